"""Work in a thread that may be left behind: for calls of other people's clients that know no time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_background(what: str, work: Callable[[], object], patience_s: float = 0.5) -> None:
    """Do the work in a daemon thread and wait a moment for it; a thread that hangs ends with the process."""
    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(patience_s)


def within(what: str, work: Callable[[], T], timeout_s: float) -> T:
    """The work's result, or its error. Raises TimeoutError when it takes longer; it is then left behind.

    >>> within("a sum", lambda: 1 + 1, timeout_s=5.0)
    2
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: the caller's thread raises it
            failed.append(error)

    in_background(what, run, max(0.0, timeout_s))
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"{what}: no answer within {timeout_s:.1f} s")
    return done[0]
