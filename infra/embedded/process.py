"""Server processes: started so that they outlive their starter, known again without doubt, stopped by pid.

A server carries marks on its command line (system properties of Java): what it is, the state folder it belongs to, and
a random word of this start. A pid alone says nothing, since the system hands it to somebody else one day; neither does
the start time alone, which shifts when the clock is set. A process is ours when its command line carries our marks.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

SPAWN_TIMEOUT_S = 30.0
LARGEST_LOG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Record:
    """What is noted about a server: enough to find it again, and to start it again on the same ports."""

    name: str
    ports: tuple[int, ...]
    """Ports in use; the first is the one for clients."""
    pid: int = 0
    word: str = ""
    """Random word of this start, on its command line."""
    started_s: float = 0.0
    """Start time of the process, seconds since 1970."""

    def save(self, folder: Path) -> None:
        """Write the note of this server; whole or not at all."""
        partial = folder / f"server.json.{os.getpid()}"
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(folder / "server.json")


def load(folder: Path) -> Record | None:
    """The note of the server of this folder; None when it never ran or the note is broken."""
    try:
        noted = json.loads((folder / "server.json").read_text())
        return Record(**{**noted, "ports": tuple(int(port) for port in noted["ports"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def marks(name: str, folder: Path) -> dict[str, str]:
    """Marks of a new start."""
    return {"offsetrl.server": name, "offsetrl.folder": str(folder), "offsetrl.word": secrets.token_hex(8)}


def spawn(command: Sequence[str], log: Path) -> int:
    """Start a process in a session of its own, its output appended to `log`; return its pid.

    The shell between hands it over to init at once: the starter has no child to wait for, and leaves no zombie.
    """
    if log.exists() and log.stat().st_size > LARGEST_LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))
    done = subprocess.run(
        ["/bin/sh", "-c", 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!', "sh", str(log), *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SPAWN_TIMEOUT_S,
        start_new_session=True,
        cwd=log.parent,
        check=True,
    )
    return int(done.stdout)


def find(name: str, folder: Path) -> psutil.Process | None:
    """The living server of this folder, by its note, else by the marks of any process (the starter may have died
    before it could write the note)."""
    wanted = {"offsetrl.server": name, "offsetrl.folder": str(folder)}
    noted = load(folder)
    if noted is not None and noted.pid and (process := _ours(noted.pid, wanted | {"offsetrl.word": noted.word})):
        return process
    for candidate in psutil.pids():
        if process := _ours(candidate, wanted):
            return process
    return None


def _ours(pid: int, wanted: Mapping[str, str]) -> psutil.Process | None:
    """The process, if it lives and carries all the marks."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        line = process.cmdline()
    except psutil.Error:
        return None
    return process if all(f"-D{key}={value}" in line for key, value in wanted.items()) else None


def stop(process: psutil.Process, grace_s: float) -> bool:
    """SIGTERM, and SIGKILL when it is still there after `grace_s`. Whether it ended by itself.

    psutil compares the start time before each signal, so that a pid taken over meanwhile is left alone.
    """
    try:
        process.terminate()
        process.wait(grace_s)
        return True
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        pass
    try:
        process.kill()
        process.wait(10)
    except psutil.NoSuchProcess:
        pass
    return False


def tail(log: Path, lines: int = 12) -> str:
    """Last lines of a log file, for an error text."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
