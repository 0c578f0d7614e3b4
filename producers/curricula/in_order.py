"""in-order: the items as they stand, pass after pass."""

from __future__ import annotations

from producers.curriculum import Draw, History
from producers.task_order import item_at


def in_order(draw: Draw, history: History) -> int:
    """Item n modulo the number of items; item n of endless ones.

    >>> none = History(0, 1)
    >>> [in_order(Draw(number=n, num_items=3, seed=0), none) for n in range(5)]
    [0, 1, 2, 0, 1]
    """
    return item_at(draw.number, num_items=draw.num_items, seed=draw.seed, shuffle=False)
