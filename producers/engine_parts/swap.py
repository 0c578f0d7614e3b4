"""When offered weights take the place of the older ones, and what becomes of the requests that run meanwhile.

Knows no weights. Only the newest offer counts: its folder is the one that whoever fetched it leaves on disk.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from schemas.errors import SettingError
from schemas.names import nearest
from schemas.records import Version


class Swap(StrEnum):
    """What a swap means for running requests."""

    KEEP = "keep"
    """They go on at once, over the keys and values of the older weights."""
    RECOMPUTE = "recompute"
    """They go on once the new weights have read their prompt and tokens anew."""
    FINISH = "finish"
    """They finish on the older weights first; requests that were not begun wait for the new ones."""


def swap_mode(text: str) -> Swap:
    """The mode of an engine's setting `swap`. Raises SettingError.

    >>> swap_mode("keep").value
    'keep'
    """
    if text not in set(Swap):
        raise SettingError(
            f"the engine's setting swap is {text!r}; it must be {', '.join(Swap)}; {nearest(text, Swap)}"
        )
    return Swap(text)


class SwapQueue:
    """Weights that were offered and not loaded yet.

    >>> queue = SwapQueue(Swap.FINISH)
    >>> queue.offer(Path("a"), Version(1, 1)), queue.due(num_running=2), queue.holds_back
    (None, None, True)
    >>> queue.offer(Path("b"), Version(1, 2)), queue.due(num_running=0), queue.holds_back
    (None, (PosixPath('b'), Version(epoch=1, version=2)), False)
    """

    def __init__(self, mode: Swap) -> None:
        self.mode = mode
        self._offered: tuple[Path, Version] | None = None

    @property
    def holds_back(self) -> bool:
        """Whether nothing new may begin, for it would begin on weights that are about to go."""
        return self._offered is not None

    def offer(self, folder: Path, version: Version) -> None:
        """Take note of verified weights; those offered before and not loaded are forgotten."""
        self._offered = (folder, version)

    def due(self, num_running: int) -> tuple[Path, Version] | None:
        """The weights to load now, given how many requests have begun; they are then no longer on offer."""
        if self.mode is Swap.FINISH and num_running:
            return None
        offered, self._offered = self._offered, None
        return offered
