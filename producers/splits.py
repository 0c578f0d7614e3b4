"""Which items of a task are trained on, and which are held out for evaluation: a function of the item's number alone.

Of a finite task an item is held out when a stable hash of its number falls below the share, so rows added to a file change
nothing for those before them. Of an endless one the items held out lie beyond any number that training reaches; there the
numbers differ, though not always what is drawn from them: a task of few different prompts repeats them.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from producers.curriculum import Finished, History
from schemas.seeds import derive_seed

HELD_OUT, TRAINING = "held-out", "training"
SPLITS = (HELD_OUT, TRAINING)
FIRST_HELD_OUT = 2**40
"""Of an endless task, the first item that is held out."""


def is_held_out(item: int, seed: int, share: float) -> bool:
    """Whether an item of a finite task is held out; about `share` of all are.

    >>> [item for item in range(20) if is_held_out(item, 0, 0.2)]
    [1, 2, 3, 4, 8]
    """
    return derive_seed(seed, HELD_OUT, item) < share * 2**63


class Parts(NamedTuple):
    """Items of both parts, in order."""

    training: Sequence[int]
    held_out: Sequence[int]


@functools.lru_cache(maxsize=4)
def _parts(num_items: int, seed: int, share: float) -> Parts:
    held = frozenset(item for item in range(num_items) if is_held_out(item, seed, share))
    return Parts([item for item in range(num_items) if item not in held], sorted(held))


@dataclass(frozen=True, slots=True)
class Split:
    """The two parts of a task's items; `num_items` None: endless. `seed` is the run's, the same for all of its policies.

    >>> split = Split(20, 0, 0.2)
    >>> split.num_training, split.num_held_out, split.training(3), split.place(7), split.held_out(0)
    (15, 5, 7, 3, 1)
    >>> endless = Split(None, 0, 0.2)
    >>> endless.num_training, endless.training(7), endless.held_out(0) == FIRST_HELD_OUT
    (None, 7, True)
    """

    num_items: int | None
    seed: int
    share: float

    @property
    def num_training(self) -> int | None:
        """How many items are trained on; None for endless."""
        return None if self.num_items is None else len(self._finite(self.num_items).training)

    @property
    def num_held_out(self) -> int | None:
        """How many are held out; None for endless."""
        return None if self.num_items is None else len(self._finite(self.num_items).held_out)

    def training(self, place: int) -> int:
        """The item at a place among those trained on."""
        return place if self.num_items is None else self._finite(self.num_items).training[place]

    def held_out(self, place: int) -> int:
        """The item at a place among those held out."""
        return FIRST_HELD_OUT + place if self.num_items is None else self._finite(self.num_items).held_out[place]

    def place(self, item: int) -> int | None:
        """The place of an item among those trained on; None for one that is not."""
        if self.num_items is None:
            return item
        training = self._finite(self.num_items).training
        place = bisect.bisect_left(training, item)
        return place if place < len(training) and training[place] == item else None

    def seen(self, history: History) -> History:
        """What a curriculum is to see: results by the place of their items, so that it knows nothing of those held out."""
        return history if self.num_items is None or not self.share else _Placed(history, self)

    def _finite(self, num_items: int) -> Parts:
        return _parts(num_items, self.seed, self.share) if self.share else Parts(range(num_items), ())


class _Placed(History):
    """A history by places. Reads the one it is given, and holds nothing."""

    def __init__(self, history: History, split: Split) -> None:
        super().__init__(0, 1)
        self._history, self._split = history, split

    def of(self, item: int) -> Sequence[Finished]:
        return self._history.of(self._split.training(item))

    def items(self) -> Iterator[int]:
        places = map(self._split.place, self._history.items())
        return (place for place in places if place is not None)

    def __len__(self) -> int:
        return len(self._history)
