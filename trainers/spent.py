"""Where a trainer's time goes: seconds by cause since its last step; what has no cause of its own was spent starving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

STARVED = "starved"


class Spent:
    """Seconds by cause.

    >>> ticks = iter([0.0, 1.0, 4.0, 10.0, 10.0])
    >>> spent = Spent(lambda: next(ticks))
    >>> with spent.on("step"):
    ...     pass
    >>> spent.shares()
    {'time.step': 0.3, 'time.starved': 0.7}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """Time inside this context is spent on `cause`."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + self._clock() - began_s

    def shares(self) -> dict[str, float]:
        """Shares of the time since the last call, named `time.<cause>`; counts from now on."""
        now_s = self._clock()
        total_s = max(now_s - self._since_s, 1e-9)
        found = {f"time.{cause}": seconds / total_s for cause, seconds in sorted(self._seconds.items())}
        found[f"time.{STARVED}"] = max(1.0 - sum(found.values()), 0.0)
        self._since_s, self._seconds = self._clock(), {}
        return {name: round(share, 6) for name, share in found.items()}
