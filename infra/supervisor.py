"""Runs child processes: restarts what dies, never leaves one behind.

Each child leads a process group of its own, so that its helpers die with it; a small reaper process (`infra.reaper`)
kills the groups when the supervisor itself is killed. One thread of the supervisor starts and watches all children: the
kernel's parent-death signal belongs to the starting *thread*, so that thread lives as long as the supervisor.

A child is not started again after exit code 0 (done), 2 (its settings are wrong) or 4 (superseded), after it was told
to end, or when it died `give_up_after` times in a row.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import structlog

from infra import reaper
from infra.lifecycle import PARENT_VARIABLE, Exit
from schemas.errors import DeadlineExceeded

_FINAL = (Exit.OK, Exit.SETTING, Exit.SUPERSEDED)
_POLL_S = 0.05
_BACKOFF_S = (0.5, 10.0)
_HEALTHY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A child: its name, command line, additions to the environment, and the file that takes its output."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path


@dataclass(frozen=True, kw_only=True)
class ChildStatus:
    """A child as it is now."""

    name: str
    pid: int | None
    """None while it does not run."""
    exits: tuple[int, ...]
    """Exit codes so far; -9 for SIGKILL."""
    finished: bool
    """It will not be started again."""

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, len(self.exits) - 1) if self.pid is None else len(self.exits)


class _Child:
    """One child's state; every access under the supervisor's lock."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.exits: list[int] = []
        self.told = False
        self.finished = False
        self.failures = 0
        self.started_s = 0.0
        self.next_start_s = 0.0


class Supervisor:
    """Starts the children on entry, ends them all on exit; use it as a context."""

    def __init__(self, specs: Sequence[ChildSpec], *, give_up_after: int = 8) -> None:
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names), f"children's names must differ: {names}"
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._give_up_after = give_up_after
        self._lock = threading.RLock()
        self._closing = False
        self._started = threading.Event()
        self._bug: BaseException | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._log = structlog.get_logger("offsetrl.supervisor")

    def __enter__(self) -> Supervisor:
        self._reaper = _start_reaper()
        atexit.register(self.kill)
        self._thread.start()
        self._started.wait()
        if self._bug is not None:
            self.close()
            raise self._bug
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, spec: ChildSpec) -> None:
        """Start one more child."""
        with self._lock:
            assert spec.name not in self._children, f"there is a child {spec.name!r} already"
            self._children[spec.name] = _Child(spec)

    def pids(self) -> dict[str, int]:
        """Process ids of the children that run."""
        return {status.name: status.pid for status in self.status() if status.pid is not None}

    def exits(self) -> dict[str, tuple[int, ...]]:
        """Exit codes of every child so far, in order; negative for a signal."""
        return {status.name: status.exits for status in self.status()}

    def finished(self) -> dict[str, int]:
        """Children that will not be started again, with their last exit code."""
        return {status.name: status.exits[-1] for status in self.status() if status.finished and status.exits}

    def status(self) -> list[ChildStatus]:
        """All children. Raises what ended the watching thread, if anything did."""
        if self._bug is not None:
            raise self._bug
        with self._lock:
            return [
                ChildStatus(
                    name=name,
                    pid=child.process.pid if child.process else None,
                    exits=tuple(child.exits),
                    finished=child.finished,
                )
                for name, child in self._children.items()
            ]

    def wait(self, names: Collection[str], timeout_s: float) -> None:
        """Wait until these children are finished. Raises DeadlineExceeded naming those that are not."""
        deadline = time.monotonic() + timeout_s
        while left := [status.name for status in self.status() if status.name in names and not status.finished]:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{', '.join(left)} still ran after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def terminate(self, names: Collection[str], grace_s: float) -> dict[str, int]:
        """Tell children to end (SIGTERM), kill the groups of those that have not after `grace_s`; last exit codes."""
        with self._lock:
            for name in names:
                child = self._children[name]
                child.told = True
                if child.process is None:
                    child.finished = True
                else:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.process.pid, signal.SIGTERM)  # the leader drains and needs its helpers for that
        try:
            self.wait(names, grace_s)
        except DeadlineExceeded as error:
            self._log.warning("killed after the grace time", error=str(error))
            with self._lock:
                for name in names:
                    self._kill(self._children[name])
            self.wait(names, 10.0)
        return {name: codes[-1] for name, codes in self.exits().items() if name in names and codes}

    def tail(self, name: str, lines: int = 20) -> str:
        """The last lines of a child's output."""
        path = self._children[name].spec.log_path
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL for every group at once; nothing is started again. Safe in signal handlers' callbacks."""
        self._closing = True
        for child in self._children.values():
            child.told = True
            self._kill(child)

    def close(self) -> None:
        """Kill what still runs and stop watching; never raises for children that are gone already."""
        self.kill()
        if self._thread.is_alive():
            self._thread.join(10.0)
        self.kill()  # one that was just being started
        if self._reaper is not None:
            _close(self._reaper)
            self._reaper = None
        atexit.unregister(self.kill)

    def _watch(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    for child in list(self._children.values()):
                        self._tend(child)
                self._started.set()
                time.sleep(_POLL_S)
            self._collect()
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread by the next call
            self._bug = error
            self._started.set()

    def _tend(self, child: _Child) -> None:
        """Start a child that is due; note the end of one."""
        if child.process is None:
            if not child.finished and not self._closing and time.monotonic() >= child.next_start_s:
                self._start(child)
            return
        code = child.process.poll()
        if code is not None:
            self._note_end(child, code)

    def _start(self, child: _Child) -> None:
        spec = child.spec
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as output:
            child.process = self._spawn(spec, output)
        child.started_s = time.monotonic()
        self._tell_reaper(f"+{child.process.pid}")
        self._log.debug("started", child=spec.name, pid=child.process.pid)

    def _spawn(self, spec: ChildSpec, output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(spec.argv),
            env={**os.environ, **spec.env, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )

    def _note_end(self, child: _Child, code: int) -> None:
        assert child.process is not None
        self._kill(child)  # helpers that it left behind
        self._tell_reaper(f"-{child.process.pid}")
        now = time.monotonic()
        child.failures = 1 if now - child.started_s > _HEALTHY_S else child.failures + 1
        child.process = None
        child.exits.append(code)
        child.finished = child.told or code in _FINAL or child.failures >= self._give_up_after
        if child.finished:
            self._log.info("ended", child=child.spec.name, exit_code=code, told=child.told)
            return
        wait_s = min(_BACKOFF_S[0] * 2 ** min(child.failures - 1, 8), _BACKOFF_S[1])
        child.next_start_s = now + wait_s
        self._log.warning("died, will be started again", child=child.spec.name, exit_code=code, wait_s=wait_s)

    def _kill(self, child: _Child) -> None:
        if (process := child.process) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _collect(self) -> None:
        """After a kill: wait for the dead, so that none stays a zombie."""
        for child in self._children.values():
            self._kill(child)
            if child.process is not None:
                child.exits.append(child.process.wait(10.0))
                self._tell_reaper(f"-{child.process.pid}")
                child.process, child.finished = None, True

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper is not None
        try:
            _write(self._reaper, [line])
        except BrokenPipeError:  # somebody killed it: the next one is told everything
            _close(self._reaper)
            self._reaper = _start_reaper()
            _write(self._reaper, [f"+{child.process.pid}" for child in self._children.values() if child.process])


def _start_reaper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-E", reaper.__file__], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def _write(process: subprocess.Popen[bytes], lines: Sequence[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(f"{line}\n" for line in lines).encode())


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait(10.0)
