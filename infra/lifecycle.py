"""How a process ends: stop signals, exit codes, the guard against two homes, and death with the supervisor.

Exit codes of every command:

| code | meaning | restarted by a supervisor |
|---|---|---|
| 0 | done, or drained after SIGTERM | no |
| 1 | a check failed: an audit that does not close, wrong weights, a gap or cut in the log | yes |
| 2 | a setting, name or file of the user's is wrong, or wrong usage | no |
| 3 | something outside is away or broken: broker, object store, engine | yes |
| 4 | superseded: a newer owner has claimed the policy | no |
| 5 | a wait hit its limit; the message names what was waited for | yes |
| 70 | a bug; the traceback is shown | yes |
| 130, 143 | aborted by a second SIGINT or SIGTERM | yes |
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib.metadata
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from schemas.errors import DeadlineExceeded, DependencyError, OffsetRLError, SendFailed, SettingError, Superseded

ROOMS = ("schemas", "infra", "producers", "consumers", "trainers")
PARENT_VARIABLE = "OFFSETRL_PARENT"
_PR_SET_PDEATHSIG = 1


class Exit(enum.IntEnum):
    """Exit codes, see the table above."""

    OK = 0
    FAILED = 1
    SETTING = 2
    DEPENDENCY = 3
    SUPERSEDED = 4
    DEADLINE = 5
    BUG = 70


def exit_code(error: BaseException) -> Exit:
    """The exit code that an error at a daemon's edge means.

    >>> exit_code(Superseded("")).name, exit_code(KeyError()).name
    ('SUPERSEDED', 'BUG')
    """
    table: tuple[tuple[type[OffsetRLError], Exit], ...] = (
        (SettingError, Exit.SETTING),
        (Superseded, Exit.SUPERSEDED),
        (DeadlineExceeded, Exit.DEADLINE),
        (DependencyError, Exit.DEPENDENCY),
        (SendFailed, Exit.DEPENDENCY),
        (OffsetRLError, Exit.FAILED),
    )
    return next((code for kind, code in table if isinstance(error, kind)), Exit.BUG)


_ABORT_S = 10.0
"""Longest that callbacks of an abort may take."""


class Stop:
    """Whether this process was asked to stop: once drains, twice aborts.

    Signals are taken in two ways, each with a count of its own. Python runs a handler only when the main thread comes
    back to Python, which may take minutes (a long step in C, or a sleep while the kernel gave the signal to another
    thread); a thread that reads the wake-up pipe sees them at once.
    """

    def __init__(self) -> None:
        # Not an Event: its lock is taken by a wait in the main thread, where the handler would then hang for ever.
        self._requested = False
        self._handled = 0
        self._on_abort: list[Callable[[], None]] = []
        self._aborting = threading.Lock()

    @property
    def requested(self) -> bool:
        """True after the first SIGTERM or SIGINT."""
        return self._requested

    def request(self) -> None:
        """Ask to stop, as the first signal does."""
        self._requested = True

    def wait(self, timeout_s: float) -> bool:
        """Sleep until asked to stop, or the timeout; returns `requested`."""
        deadline = time.monotonic() + timeout_s
        while not self._requested and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))
        return self._requested

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Call this before a second signal ends the process at once."""
        self._on_abort.append(callback)

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT; main thread only."""
        source, sink = os.pipe()
        os.set_blocking(sink, False)
        threading.Thread(target=self._listen, args=(source,), name="signals", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)

    def _listen(self, source: int) -> None:
        seen = 0
        while numbers := os.read(source, 64):
            for number in numbers:
                if number in (signal.SIGTERM, signal.SIGINT):
                    seen += 1
                    self._count(seen, number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1
        self._count(self._handled, number)

    def _count(self, times: int, number: int) -> None:
        self._requested = True
        if times < 2:
            return
        if self._aborting.acquire(blocking=False):
            for callback in self._on_abort:
                with contextlib.suppress(Exception):
                    callback()
        else:
            time.sleep(_ABORT_S)  # the other way is at it, and ends the process meanwhile, unless a callback hangs
        os._exit(128 + number)


def one_home() -> None:
    """Refuse to run when another distribution or folder shadows one of the rooms: their names are plain words.

    Installers overwrite a `schemas/` of another distribution without a warning, and `python -m` prefers one that
    lies in the working directory.
    """
    homes: dict[str, Path] = {}
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        if spec is None or spec.origin is None:
            raise SettingError(f"the package {room!r} of OffsetRL is not installed whole: install offsetrl again")
        homes[room] = Path(spec.origin).resolve().parent.parent
    if len(set(homes.values())) > 1:
        found = ", ".join(f"{room} in {home}" for room, home in homes.items())
        raise SettingError(
            f"OffsetRL's packages come from several places ({found}): something else has a package of that name. "
            "Use a virtual environment of its own, and start from another folder or with PYTHONSAFEPATH=1"
        )
    if owners := _foreign_owners():
        raise SettingError(f"{owners}: use a virtual environment of OffsetRL's own")


def _foreign_owners() -> str:
    """Other distributions that install a room. Looks at lists of files only, which takes some 10 ms."""
    marks = tuple(f"{room}/__init__.py," for room in ROOMS)
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name == "offsetrl":
            continue
        record = distribution.read_text("RECORD") or ""
        if room := next((mark.partition("/")[0] for mark in marks if f"\n{mark}" in f"\n{record}"), None):
            return f"the distribution {name!r} installs a package {room!r} as well, which OffsetRL needs for itself"
    return ""


def die_with_parent(environ: Mapping[str, str] | None = None) -> None:
    """Under a supervisor, end when it ends, even by SIGKILL; elsewhere do nothing.

    The kernel's signal on Linux, and a look at the parent's pid everywhere (also for a parent that is gone already).
    """
    text = (os.environ if environ is None else environ).get(PARENT_VARIABLE, "")
    if not text:
        return
    if not text.isdigit():
        raise SettingError(f"{PARENT_VARIABLE} must be a process id, and is {text!r}: unset it")
    parent = int(text)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.pop(PARENT_VARIABLE, None)  # it names our parent, not that of our children
    _end_without(parent)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while True:
        _end_without(parent)
        time.sleep(0.5)


def _end_without(parent: int) -> None:
    if os.getppid() != parent:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)
