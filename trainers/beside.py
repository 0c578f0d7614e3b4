"""Work in a thread of its own, so that the loop that waits for it can go on with small things."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.errors import OffsetRLError

T = TypeVar("T")
EVERY_S = 0.05


class _Work(threading.Thread, Generic[T]):
    """One call; its result or what it raised."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="step", daemon=True)
        self._work = work
        self.results: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.results.append(self._work())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            self.error = error


def beside(work: Callable[[], T], meanwhile: Callable[[], None], every_s: float = EVERY_S) -> T:
    """What `work` returns or raises; until then `meanwhile` is called again and again in this thread.

    What `meanwhile` raises of our own errors is kept until the work is done, since work on the weights is never left
    half done; then it is raised.

    >>> beside(lambda: 7, lambda: None)
    7
    """
    thread = _Work(work)
    thread.start()
    trouble: OffsetRLError | None = None
    while True:
        thread.join(every_s)
        if not thread.is_alive():
            break
        if trouble is None:
            try:
                meanwhile()
            except OffsetRLError as error:
                trouble = error
    if thread.error is not None:
        raise thread.error
    if trouble is not None:
        raise trouble
    return thread.results[0]
