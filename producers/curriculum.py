"""What a curriculum sees and says: the groups that ended not long ago go in, the item of the next group comes out. Pure.

Memory is the newest outcomes of each partition, in the order of their chain, and an item's results are in order of their
group numbers: so whatever order partitions are read in, and however often the dispatcher starts again, the same log gives
the same memory.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Finished(NamedTuple):
    """One group that ended, kept or not."""

    number: int
    item: int
    rewards: tuple[float, ...]
    """Of the members that have one: a failure is not a reward."""
    num_sampled: float
    """Sampled tokens, mean over its members; 0 where none came."""

    @property
    def mean_reward(self) -> float | None:
        """Mean over the members with a reward; None where none has one.

        >>> Finished(0, 5, (1.0, 0.0), 8.0).mean_reward
        0.5
        """
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The group that needs an item."""

    number: int
    """Its running number: 0, 1, 2, ..."""
    num_items: int | None
    """Items of the task; None for endless."""
    seed: int
    """The same for all groups of a policy."""


class History:
    """Results of the newest groups, by item; `memory` of them, shared evenly between the partitions.

    >>> history = History(memory=4, partitions=2)
    >>> for number in (0, 2, 4):
    ...     history.saw(0, Finished(number, 7, (1.0,), 3.0))
    >>> [entry.number for entry in history.of(7)], history.of(8), list(history.items())
    ([2, 4], (), [7])
    """

    def __init__(self, memory: int, partitions: int) -> None:
        self.per_partition = -(-memory // partitions)
        """Results remembered of each partition."""
        self._order: dict[int, deque[Finished]] = {}
        self._items: dict[int, list[Finished]] = {}

    def saw(self, partition: int, entry: Finished) -> None:
        """The next group of a partition's chain."""
        if not self.per_partition:
            return
        order = self._order.setdefault(partition, deque())
        order.append(entry)
        bisect.insort(self._items.setdefault(entry.item, []), entry)
        if len(order) > self.per_partition:
            gone = order.popleft()
            self._items[gone.item].remove(gone)
            if not self._items[gone.item]:
                del self._items[gone.item]

    def of(self, item: int) -> Sequence[Finished]:
        """Results of an item, in order of their group numbers."""
        return self._items.get(item, ())

    def items(self) -> Iterator[int]:
        """Items with results, in order."""
        return iter(sorted(self._items))

    def __len__(self) -> int:
        return sum(map(len, self._order.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]  # it changes


class Curriculum(Protocol):
    """Chooses the item of a group: a function of (draw, history) alone, so that it can be told again from the log."""

    def __call__(self, draw: Draw, history: History) -> int:
        """The item: 0 or more, and below `num_items` unless that is None."""
        ...
