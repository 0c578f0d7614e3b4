"""The embedded servers as real processes: found again, restarted with their data, stopped without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from infra.embedded import ports, process, servers
from infra.log import TopicSpec
from infra.settings import EmbeddedTable, Settings
from infra.wiring import open_log, open_store
from schemas.errors import DependencyError, SettingError
from support.servers import ROOT, S3Endpoint

pytestmark = [pytest.mark.broker, pytest.mark.s3]
UP = """
import pathlib, sys
from infra.embedded import servers
from infra.settings import EmbeddedTable
print(servers.up(EmbeddedTable(state=pathlib.Path(sys.argv[1])), "first-bucket").bootstrap_servers)
"""


def up_elsewhere(state: Path) -> str:
    """`up` in a process that then ends; what it printed."""
    done = subprocess.run([sys.executable, "-c", UP, str(state)], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def pids(state: Path) -> dict[str, int | None]:
    return {found.name: found.pid for found in servers.status(state)}


def ours(state: Path) -> list[psutil.Process]:
    """Every process that belongs to a state folder, however it got there."""
    found = []
    for candidate in psutil.process_iter(["cmdline"]):
        if any(f"-Doffsetrl.folder={state}" in word for word in candidate.info["cmdline"] or ()):
            found.append(candidate)
    return found


def settings(state: Path) -> Settings:
    return Settings.model_validate(
        {"embedded": {"state": state}, "s3": {"bucket": "first-bucket"}, "policies": {"main": {"model": "unused"}}}
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Servers that a process has started which is gone."""
    folder = tmp_path_factory.mktemp("state")
    try:
        up_elsewhere(folder)
        yield folder
    finally:
        servers.down(folder)


def test_up_is_idempotent_and_servers_outlive_their_starter(state: Path) -> None:
    before = pids(state)
    assert None not in before.values()
    first = servers.up(EmbeddedTable(state=state), "first-bucket")
    assert servers.up(EmbeddedTable(state=state), "first-bucket") == first == servers.endpoints(state)
    assert pids(state) == before
    assert all(found.answers for found in servers.status(state))


def test_two_processes_at_once_get_the_same_servers(state: Path) -> None:
    servers.down(state)
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(up_elsewhere, [state, state]))
    assert said[0] == said[1] == servers.endpoints(state).bootstrap_servers
    assert len(ours(state)) == 2


def test_killed_broker_comes_back_with_port_and_data(state: Path) -> None:
    first = servers.up(EmbeddedTable(state=state), "first-bucket")
    log = open_log(settings(state), "test")
    log.create([TopicSpec("kept", 1)])
    writer = log.writer()
    assert writer.send("kept", 0, b"a record").result(30).offset == 0
    writer.close()
    log.close()
    broker = pids(state)["kafka"]
    assert broker is not None
    os.kill(broker, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(broker)] if psutil.pid_exists(broker) else [], timeout=10)

    assert servers.up(EmbeddedTable(state=state), "first-bucket") == first
    log = open_log(settings(state), "test")
    assert log.bounds("kept")[0].end == 1
    log.close()


def test_down_leaves_no_process_and_up_keeps_ports_keys_and_data(state: Path) -> None:
    first = servers.up(EmbeddedTable(state=state), "first-bucket")
    open_store(settings(state)).put("a/key", b"bytes")
    assert sorted(servers.down(state)) == ["kafka", "s3"]
    assert ours(state) == []
    assert servers.down(state) == []
    assert pids(state) == {"kafka": None, "s3": None}
    assert servers.up(EmbeddedTable(state=state), "first-bucket") == first
    assert open_store(settings(state)).get("a/key") == b"bytes"


def test_a_server_whose_note_is_lost_is_still_found(state: Path) -> None:
    servers.up(EmbeddedTable(state=state), "first-bucket")
    before = pids(state)
    (state / "s3" / "server.json").unlink()
    assert pids(state) == before
    servers.up(EmbeddedTable(state=state), "first-bucket")
    assert len(ours(state)) == 2


def test_one_server_alone(state: Path) -> None:
    servers.down(state)
    found = servers.up(EmbeddedTable(state=state), "first-bucket", only=["s3"])
    assert (found.bootstrap_servers, bool(found.s3_url)) == ("", True)
    assert pids(state)["kafka"] is None


def test_running_server_on_another_port_than_configured_is_refused(state: Path) -> None:
    servers.up(EmbeddedTable(state=state), "first-bucket", only=["s3"])
    (other,) = ports.find_free(1)
    with pytest.raises(SettingError, match=f"embedded.s3_port is {other}.*offsetrl down"):
        servers.up(EmbeddedTable(state=state, s3_port=other), "first-bucket", only=["s3"])


def test_another_bucket_of_a_running_store(state: Path) -> None:
    servers.up(EmbeddedTable(state=state), "second-bucket", only=["s3"])
    second = settings(state).model_copy(
        update={"s3": settings(state).s3.model_copy(update={"bucket": "second-bucket"})}
    )
    open_store(second).put("x", b"1")


def test_broken_broker_data_is_told_with_its_last_words(state: Path, tmp_path: Path) -> None:
    (tmp_path / "kafka" / "data").mkdir(parents=True)
    (tmp_path / "kafka" / "data" / "meta.properties").write_text("version=1\nnode.id=99\ncluster.id=abc\n")
    with pytest.raises(DependencyError, match=r"(?s)kafka server ended at once.*99"):
        servers.up(EmbeddedTable(state=tmp_path), "first-bucket", only=["kafka"])
    assert ours(tmp_path) == []


def test_secrets_are_the_owners_alone(state: Path) -> None:
    found = servers.endpoints(state)
    assert found.secret_key not in repr(found)
    for name in ("credentials.json", "s3proxy.properties"):
        assert stat.S_IMODE((state / "s3" / name).stat().st_mode) == 0o600
    for running in ours(state):
        assert found.secret_key not in " ".join(running.cmdline())


def test_servers_listen_on_loopback_alone(state: Path) -> None:
    servers.up(EmbeddedTable(state=state), "first-bucket")
    for running in ours(state):
        heard = [c.laddr for c in running.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert heard
        for address in heard:
            assert address.ip.removeprefix("::ffff:") == "127.0.0.1"
            assert address.port < 32768


def test_session_fixtures(bootstrap: str, s3_endpoint: S3Endpoint) -> None:
    assert ports.HOST in bootstrap
    assert s3_endpoint.secret_key not in repr(s3_endpoint)


def test_a_foreign_process_under_the_noted_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as foreign:
        try:
            folder = tmp_path / "kafka"
            folder.mkdir()
            started_s = psutil.Process(foreign.pid).create_time()
            process.Record("kafka", (20001, 20002), foreign.pid, "word", started_s).save(folder)
            assert servers.down(tmp_path) == []
            assert pids(tmp_path)["kafka"] is None
            assert foreign.poll() is None
        finally:
            foreign.kill()


def test_a_configured_port_in_use_is_refused_with_its_holder(tmp_path: Path) -> None:
    with socket.socket() as holder:
        (port,) = ports.find_free(1)
        holder.bind((ports.HOST, port))
        holder.listen()
        with pytest.raises(SettingError, match=rf"embedded.kafka_port is {port}, .*pid {os.getpid()}"):
            servers.up(EmbeddedTable(state=tmp_path, kafka_port=port), "first-bucket")
    assert ours(tmp_path) == []


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(SettingError, match=r"100 MiB free.*embedded\.state"):
        servers.up(EmbeddedTable(state=tmp_path), "first-bucket")
    assert ours(tmp_path) == []


def test_endpoints_of_servers_never_started(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="offsetrl up"):
        servers.endpoints(tmp_path)
