"""The doctor: what is well is said to be well, and each illness is named with what to do."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra import doctor, kafka_probe, provision, wiring
from infra._doctor_basics import Check, check_crc32c, check_disk, compare_clocks
from infra.embedded.ports import HOST, find_free
from infra.log import Place, TopicSpec
from infra.memory_log import MemoryLog, wall_clock_ms
from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.wiring import Endpoints
from schemas.codec import decode
from schemas.errors import BrokerError, StoreError
from schemas.records import Heartbeat
from support.servers import S3Endpoint

BUCKET = "offsetrl-tests"


def settings(**tables: Any) -> Settings:
    return Settings.model_validate({"policies": {"main": {"model": "unused"}}, **tables})


def named(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


@contextmanager
def listener(answer: bytes = b"") -> Iterator[int]:
    """A server that takes connections and gives every one the same answer."""
    with socket.socket() as server:
        (port,) = find_free(1)
        server.bind((HOST, port))
        server.listen()
        server.settimeout(0.1)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(1)
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port
        finally:
            stop.set()
            thread.join()


def broker_checks(log: MemoryLog, own: Settings) -> dict[str, Check]:
    """What the doctor says about a log behind a port that is open (and speaks no Kafka)."""
    with listener() as port:
        return named(list(doctor.check_broker(own, Endpoints(f"{HOST}:{port}", "", None, None), lambda: log)))


@pytest.mark.broker
@pytest.mark.s3
def test_a_healthy_place(bootstrap: str, s3_endpoint: S3Endpoint, tmp_path: Path) -> None:
    own = settings(
        run={"name": "doctor", "folder": tmp_path},
        kafka={"bootstrap_servers": bootstrap},
        s3={
            "endpoint_url": s3_endpoint.url,
            "bucket": s3_endpoint.bucket,
            "access_key": s3_endpoint.access_key,
            "secret_key": s3_endpoint.secret_key,
        },
    )
    fresh = named(doctor.examine(own))
    assert [check for check in fresh.values() if not check.ok] == []
    assert fresh["broker release"].got == "4.2"
    assert "none yet" in fresh["topics"].got
    assert "clock of the broker" not in fresh

    log = wiring.open_log(own, "test")
    provision.provision(log, own)
    log.close()
    checks = named(doctor.examine(own))
    assert [check for check in checks.values() if not check.ok] == []
    assert checks["topics"].got == f"all {len(provision.topic_specs(own))} there"
    assert set(checks) == {
        "disk of the run",
        "crc32c",
        f"broker port {bootstrap}",
        "broker release",
        "broker client",
        "topics",
        "topic limits",
        "schemas of writers",
        "clock of the broker",
        f"object store port {s3_endpoint.url.removeprefix('http://')}",
        "clock of the object store",
        "bucket",
    }


@pytest.mark.s3
def test_wrong_keys_are_told_at_the_bucket(s3_endpoint: S3Endpoint, tmp_path: Path) -> None:
    keys = {"access_key": s3_endpoint.access_key, "secret_key": "wrong-secret"}
    own = settings(s3={"endpoint_url": s3_endpoint.url, "bucket": s3_endpoint.bucket, **keys})
    endpoints = Endpoints("", s3_endpoint.url, None, None)
    checks = named(list(doctor.check_store(own, endpoints, lambda: wiring.open_store(own))))
    assert not checks["bucket"].ok
    assert "OFFSETRL_S3__ACCESS_KEY" in checks["bucket"].remedy
    assert "wrong-secret" not in str(checks)


def test_embedded_servers_never_started(tmp_path: Path) -> None:
    checks = named(doctor.examine(settings(embedded={"state": tmp_path / "state"}, run={"folder": tmp_path})))
    assert checks["java"].ok
    assert (checks["embedded servers"].ok, checks["embedded servers"].remedy) == (False, "run `offsetrl up`")
    assert not (tmp_path / "state").exists()


def test_closed_ports_are_named_and_nothing_is_asked_behind_them() -> None:
    broker, store = find_free(2)
    own = settings(kafka={"bootstrap_servers": f"{HOST}:{broker}"}, s3={"endpoint_url": f"http://{HOST}:{store}"})
    endpoints = Endpoints(f"{HOST}:{broker}", f"http://{HOST}:{store}", None, None)

    def never() -> Any:
        raise AssertionError

    checks = doctor.examine(own, endpoints, never, never)
    bad = {check.name: check.remedy for check in checks if not check.ok}
    assert list(bad) == [f"broker port {HOST}:{broker}", f"object store port {HOST}:{store}"]
    assert "kafka.bootstrap_servers" in bad[f"broker port {HOST}:{broker}"]
    assert "s3.endpoint_url" in bad[f"object store port {HOST}:{store}"]


def test_one_of_two_brokers_away_is_told_and_the_other_is_asked() -> None:
    (closed,) = find_free(1)
    with listener() as port:
        endpoints = Endpoints(f"{HOST}:{closed},{HOST}:{port}", "", None, None)
        checks = named(list(doctor.check_broker(settings(), endpoints, MemoryLog)))
    assert not checks[f"broker port {HOST}:{closed}"].ok
    assert checks["broker client"].ok


def test_a_port_that_is_no_broker() -> None:
    checks = broker_checks(MemoryLog(), settings())
    assert not checks["broker release"].ok
    assert "listener for clients" in checks["broker release"].remedy


def test_encrypted_brokers_are_not_asked_for_their_release() -> None:
    own = settings(kafka={"client": {"security.protocol": "SASL_SSL"}})
    assert "encrypted" in broker_checks(MemoryLog(), own)["broker release"].got


def test_a_client_that_gets_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_log: MemoryLog) -> set[str]:
        raise BrokerError("authentication failed")

    monkeypatch.setattr(MemoryLog, "topics", refuse)
    checks = broker_checks(MemoryLog(), settings())
    assert list(checks)[-1] == "broker client"
    assert checks["broker client"].got == "authentication failed"
    assert "sasl.mechanism" in checks["broker client"].remedy


def test_topics_half_there() -> None:
    log = MemoryLog()
    log.create(provision.topic_specs(settings())[:2])
    topics = broker_checks(log, settings())["topics"]
    assert not topics.ok
    assert topics.got.startswith("8 of 10 missing: run.main.requests")
    assert "offsetrl provision" in topics.remedy


def test_a_topic_with_producers_time_and_a_small_limit() -> None:
    specs = {spec.name: spec for spec in provision.topic_specs(settings())}
    wrong = {"message.timestamp.type": "CreateTime", "max.message.bytes": "1000"}
    specs["run.main.steps"] = TopicSpec("run.main.steps", 1, {**specs["run.main.steps"].config, **wrong})
    log = MemoryLog()
    log.create(specs.values())
    with listener() as port:
        endpoints = Endpoints(f"{HOST}:{port}", "", None, None)
        found = list(doctor.check_broker(settings(), endpoints, lambda: log))
    bad = [check for check in found if check.name == "topic run.main.steps"]
    assert [check.got.split(" is ")[0] for check in bad] == ["message.timestamp.type", "max.message.bytes"]
    assert all("kafka-configs.sh" in check.remedy and not check.ok for check in bad)


@pytest.mark.parametrize(
    ("off_s", "ok", "said"), [(0, True, "same"), (60, False, "60.0 s ahead"), (-90, False, "90.0 s behind")]
)
def test_clock_of_the_broker(off_s: int, ok: bool, said: str) -> None:
    own, log = settings(), MemoryLog(clock_ms=lambda: wall_clock_ms() + off_s * 1000)
    provision.provision(log, own)
    clock = broker_checks(log, own)["clock of the broker"]
    assert clock.ok == ok
    if off_s:
        assert abs(float(clock.got.split()[0]) - abs(off_s)) < 5
        assert said.split()[2] in clock.got
        assert "NTP" in clock.remedy


def test_the_probe_is_a_heartbeat_that_every_reader_knows() -> None:
    own, log = settings(), MemoryLog()
    provision.provision(log, own)
    assert doctor.check_broker_clock(log, "run", 5).ok
    reader = log.reader({Place("run.control", 0): 0})
    (envelope,) = reader.poll(1)
    assert envelope.value is not None
    beat = decode(envelope.value)
    assert isinstance(beat, Heartbeat)
    assert (beat.role, beat.state) == ("doctor", "left")


def test_clocks_are_compared_outside_the_span_of_the_question() -> None:
    assert compare_clocks("clock", 105.0, 100.0, 110.0) == Check("clock", True, "same as this machine's")
    assert compare_clocks("clock", 112.0, 100.0, 110.0).got == "2.0 s ahead of this machine's"
    assert not compare_clocks("clock", 90.0, 100.0, 110.0).ok


def test_a_store_with_a_clock_of_its_own() -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - 3600))
    with listener(f"HTTP/1.0 403 Forbidden\r\nDate: {date}\r\n\r\n".encode()) as port:
        clock = doctor.check_store_clock(f"http://{HOST}:{port}")
    assert not clock.ok
    assert "behind" in clock.got


def test_a_store_that_tells_no_time() -> None:
    with listener(b"HTTP/1.0 403 Forbidden\r\n\r\n") as port:
        assert doctor.check_store_clock(f"http://{HOST}:{port}").got == "not told by this store"


class ForgetfulStore(MemoryStore):
    """Acknowledges deletes and does nothing."""

    def delete(self, keys: Any) -> None:
        list(keys)


class LyingStore(MemoryStore):
    """Gives other bytes than it was given."""

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return super().get(key, max_bytes=max_bytes)[::-1]


def test_buckets() -> None:
    store = MemoryStore()
    assert doctor.check_bucket(store, BUCKET).ok
    assert list(store.list("")) == []
    assert "delete gave" in doctor.check_bucket(ForgetfulStore(), BUCKET).got
    assert "read gave" in doctor.check_bucket(LyingStore(), BUCKET).got


def test_a_store_that_refuses() -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
            raise StoreError("AccessDenied")

    own = settings(s3={"aws": True, "bucket": "weights"})
    (check,) = doctor.check_store(own, Endpoints("", "", None, None), Refusing)
    assert (check.ok, check.got) == (False, "AccessDenied")
    assert "'weights'" in check.remedy


def test_disk_and_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_disk("disk", tmp_path / "not" / "yet", "run.folder").ok
    assert check_crc32c().ok
    full = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: full)
    assert "run.folder" in check_disk("disk", tmp_path, "run.folder").remedy
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert check_crc32c() == Check(
        "crc32c", False, "missing: the Kafka client is ten times slower", "pip install crc32c"
    )


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack(">ii", 4, 7), b"\0" * 100])
def test_what_is_no_broker_does_not_serve(answer: bytes) -> None:
    with listener(answer) as port:
        assert not kafka_probe.serves(HOST, port)
        with pytest.raises((EOFError, ValueError, OSError)):
            kafka_probe.release(HOST, port)


@pytest.mark.parametrize(("level", "release"), [(29, "4.2"), (28, "4.2"), (30, "4.3"), (33, "4.4"), (25, "4.0")])
def test_release_by_metadata_level(level: int, release: str) -> None:
    name = b"metadata.version"
    feature = bytes([2, len(name) + 1]) + name + struct.pack(">hh", 7, level) + b"\0"
    body = struct.pack(">h", 0) + b"\x02" + struct.pack(">hhh", 3, 0, 13) + b"\0" + struct.pack(">i", 0)
    body += bytes([1, 0, len(feature)]) + feature
    with listener(struct.pack(">ii", len(body) + 4, 7) + body) as port:
        assert kafka_probe.release(HOST, port) == release


@pytest.mark.parametrize(
    ("level", "said"), [(34, "unknown (metadata level 34)"), (15, "older than 3.8 (metadata level 15)")]
)
def test_other_releases(level: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_probe, "_ask", lambda *_: b"")
    monkeypatch.setattr(kafka_probe, "_metadata_level", lambda _: level)
    assert kafka_probe.release(HOST, 1) == said
