"""`offsetrl up`, `down` and `status`: the embedded broker and object store, found again whoever started them.

    STATE/kafka/   server.json, server.properties, broker.log, output.log, data/
    STATE/s3/      server.json, s3proxy.properties, credentials.json, output.log, data/
    STATE/*.jars.json, STATE/servers.lock

Both start at the same time, outlive their starter, and keep data and ports over `down`, `up` and SIGKILL.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil
from filelock import FileLock, Timeout

from infra.embedded import java, kafka_server, ports, process, s3_server
from infra.settings import EmbeddedTable
from schemas.errors import DeadlineExceeded, DependencyError, SettingError

KAFKA, S3 = "kafka", "s3"
BOTH = (KAFKA, S3)
LEAST_DISK_BYTES = 1024**3
START_TIMEOUT_S = 120.0
LOCK_TIMEOUT_S = 300.0
GRACE_S = 20.0
POLL_S = 0.05
_BIND_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Endpoints:
    """How clients reach the embedded servers. Fields of a server that was not asked for are empty."""

    bootstrap_servers: str = ""
    s3_url: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server as it is now."""

    name: str
    pid: int | None
    port: int | None
    answers: bool
    started_s: float | None
    """Seconds since 1970; None when it does not run."""
    folder: Path
    log: Path


class _Kind(Protocol):
    """What differs between the two servers."""

    name: str
    log_name: str
    num_ports: int
    wanted_port: int
    setting: str

    def command(self, folder: Path, numbers: tuple[int, ...], marks: dict[str, str]) -> list[str]:
        """Write the server's files and return its command line."""
        ...

    def answers(self, port: int) -> bool:
        """Whether it serves clients on this port."""
        ...


class _Kafka:
    name, log_name, num_ports, setting = KAFKA, "broker.log", 2, "embedded.kafka_port"

    def __init__(self, table: EmbeddedTable) -> None:
        self.table, self.wanted_port = table, table.kafka_port

    def command(self, folder: Path, numbers: tuple[int, ...], marks: dict[str, str]) -> list[str]:
        runtime, jars = _java(), java.kafka_jars(self.table.kafka_version, folder.parent)
        kafka_server.prepare(folder, *numbers)
        if not kafka_server.is_formatted(folder):
            kafka_server.format_storage(runtime, jars, folder)
        return kafka_server.command(runtime, jars, folder, self.table.heap_mb, marks)

    def answers(self, port: int) -> bool:
        return kafka_server.answers(port)


class _S3:
    name, log_name, num_ports, setting = S3, "output.log", 1, "embedded.s3_port"

    def __init__(self, table: EmbeddedTable, bucket: str) -> None:
        self.bucket, self.wanted_port = bucket, table.s3_port

    def command(self, folder: Path, numbers: tuple[int, ...], marks: dict[str, str]) -> list[str]:
        runtime, jar = _java(), java.s3proxy_jar(folder.parent)
        s3_server.prepare(folder, numbers[0], self.bucket)
        return s3_server.command(runtime, jar, folder, marks)

    def answers(self, port: int) -> bool:
        return s3_server.answers(port)


@cache
def _java() -> java.Java:
    return java.find_java()


def up(table: EmbeddedTable, bucket: str, only: Collection[str] = BOTH) -> Endpoints:
    """Start what does not run yet and wait until it serves clients; what runs is left as it is.

    Raises SettingError (a port in use, no Java, too little disk: nothing was started), DependencyError when a server
    ends at once or jars cannot be fetched, DeadlineExceeded when one does not serve within START_TIMEOUT_S.
    """
    state = table.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    kinds: list[_Kind] = [kind for kind in (_Kafka(table), _S3(table, bucket)) if kind.name in only]
    with _lock(state):
        pending = [kind for kind in kinds if not _runs(kind, state / kind.name)]
        if pending:
            _check_start(pending, state)
        with ThreadPoolExecutor(len(BOTH)) as pool:
            for start in [pool.submit(_start, kind, state / kind.name) for kind in pending]:
                start.result()
        if S3 in only:
            (state / S3 / "data" / bucket).mkdir(parents=True, exist_ok=True)  # another bucket of a running store
    return endpoints(state, only)


def check(table: EmbeddedTable, only: Collection[str] = BOTH) -> None:
    """What `up` would refuse before it starts anything: too little disk, no Java, a port in use. Raises SettingError."""
    state = table.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    absent = dead(state, only)
    _check_start([kind for kind in (_Kafka(table), _S3(table, "")) if kind.name in absent], state)


def _check_start(kinds: Collection[_Kind], state: Path) -> None:
    """For all before any is started: an error names everything that was looked at, and leaves nothing running."""
    if kinds:
        _check_disk(state)
        _java()
    for kind in kinds:
        _numbers(kind, state / kind.name)


def endpoints(state: Path, only: Collection[str] = BOTH) -> Endpoints:
    """Addresses of the servers of this state folder, started or not. Raises SettingError when they never were."""
    noted = {name: process.load(state.resolve() / name) for name in only}
    if missing := [name for name, record in noted.items() if record is None]:
        raise SettingError(
            f"no embedded {' and '.join(missing)} server has been started in {state.resolve()}: run `offsetrl up` first, "
            "or give kafka.bootstrap_servers and s3.endpoint_url of servers of your own"
        )
    found = {name: f"{ports.HOST}:{record.ports[0]}" for name, record in noted.items() if record is not None}
    keys = s3_server.credentials(state.resolve() / S3) if S3 in found else s3_server.Credentials("", "")
    return Endpoints(found.get(KAFKA, ""), f"http://{found[S3]}" if S3 in found else "", *keys)


def down(state: Path, only: Collection[str] = BOTH, grace_s: float = GRACE_S) -> list[str]:
    """Stop the servers of this state folder; data, keys and ports stay. Names of those that ran."""
    state = state.resolve()
    if not state.is_dir():
        return []
    with _lock(state):
        running = {name: found for name in only if (found := process.find(name, state / name))}
        with ThreadPoolExecutor(len(BOTH)) as pool:
            clean = list(pool.map(lambda found: process.stop(found, grace_s), running.values()))
        for name, well in zip(running, clean, strict=True):
            if well:
                java.keep_archive(state / name)
    return list(running)


def status(state: Path) -> list[ServerStatus]:
    """Both servers as they are now; changes nothing, waits for nobody."""
    return [_status(kind, state.resolve() / kind.name) for kind in (_Kafka(EmbeddedTable()), _S3(EmbeddedTable(), ""))]


def dead(state: Path, only: Collection[str] = BOTH) -> list[str]:
    """Servers of this state folder that have no process; asks none whether it answers."""
    return [name for name in only if process.find(name, state.resolve() / name) is None]


def _status(kind: _Kind, folder: Path) -> ServerStatus:
    noted, found = process.load(folder), process.find(kind.name, folder)
    port = noted.ports[0] if noted else None
    return ServerStatus(
        name=kind.name,
        pid=found.pid if found else None,
        port=port,
        answers=bool(found and port and kind.answers(port)),
        started_s=found.create_time() if found else None,
        folder=folder,
        log=folder / kind.log_name,
    )


def _runs(kind: _Kind, folder: Path) -> bool:
    """Whether the server runs and serves. Refuses (SettingError) one that runs on another port than is configured."""
    found, noted = process.find(kind.name, folder), process.load(folder)
    if found is None:
        return False
    if noted is None or noted.pid != found.pid:  # its starter was killed before it could note it
        process.stop(found, GRACE_S)
        return False
    if kind.wanted_port not in (0, noted.ports[0]):
        raise SettingError(
            f"{kind.setting} is {kind.wanted_port}, but this server runs on port {noted.ports[0]} (pid {found.pid}): "
            "run `offsetrl down` first, or take the setting out"
        )
    _await(kind, noted.ports[0], found, folder)
    return True


def _start(kind: _Kind, folder: Path) -> None:
    """Start one server on its old port or a new one; a port lost to somebody else meanwhile is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(_BIND_ATTEMPTS):
        numbers = _numbers(kind, folder)
        marks = process.marks(kind.name, folder)
        command = kind.command(folder, numbers, marks)
        # Noted before the start: whoever comes after a crash right here finds ports, and the process by its marks.
        process.Record(kind.name, numbers).save(folder)
        pid = process.spawn(command, folder / "output.log")
        try:
            started_s = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            started_s = time.time()
        process.Record(kind.name, numbers, pid, marks["offsetrl.word"], started_s).save(folder)
        try:
            _await(kind, numbers[0], process.find(kind.name, folder), folder)
            return
        except DependencyError:
            lost = not all(map(ports.is_free, numbers))
            if not lost or attempt + 1 == _BIND_ATTEMPTS:
                raise


def _numbers(kind: _Kind, folder: Path) -> tuple[int, ...]:
    """Ports for the next start: the configured one (refused while in use), else the last one while free, else new."""
    noted = process.load(folder)
    if kind.wanted_port:
        if not ports.is_free(kind.wanted_port):
            raise SettingError(
                f"{kind.setting} is {kind.wanted_port}, which is in use by {ports.holder(kind.wanted_port)}: "
                "stop that process, choose another port below 32768, or 0 to have a free one found"
            )
        first = kind.wanted_port
    elif noted is not None and ports.is_free(noted.ports[0]):
        first = noted.ports[0]
    else:
        (first,) = ports.find_free(1)
    return (first, *ports.find_free(kind.num_ports - 1, avoid=frozenset({first})))


def _await(kind: _Kind, port: int, found: psutil.Process | None, folder: Path) -> None:
    """Wait until the server answers. Raises DependencyError when it ends, DeadlineExceeded when it stays silent."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while found is not None and found.is_running() and found.status() != psutil.STATUS_ZOMBIE:
        if kind.answers(port):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the embedded {kind.name} server (pid {found.pid}) does not serve on {ports.HOST}:{port} after "
                f"{START_TIMEOUT_S:.0f} s; run `offsetrl down` and `up` again. Log: {folder / kind.log_name}"
            )
        time.sleep(POLL_S)
    said = process.tail(folder / kind.log_name) or process.tail(folder / "output.log")
    raise DependencyError(f"the embedded {kind.name} server ended at once; its last words in {folder}:\n{said}")


def _check_disk(state: Path) -> None:
    free = shutil.disk_usage(state).free
    if free < LEAST_DISK_BYTES:
        raise SettingError(
            f"{state} has {free / 1024**2:.0f} MiB free; the embedded servers need at least "
            f"{LEAST_DISK_BYTES / 1024**2:.0f} MiB: free some space or move embedded.state to another disk"
        )


@contextmanager
def _lock(state: Path) -> Iterator[None]:
    """One `up` or `down` of a state folder at a time."""
    try:
        with FileLock(state / "servers.lock", timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise DeadlineExceeded(
            f"another process has been starting or stopping the servers of {state} for more than {LOCK_TIMEOUT_S:.0f} s"
        ) from error
