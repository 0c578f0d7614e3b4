"""shuffled: every item once a pass, each pass in a seeded order of its own."""

from __future__ import annotations

from producers.curriculum import Draw, History
from producers.task_order import item_at


def shuffled(draw: Draw, history: History) -> int:
    """Item of place n in the endless sequence of shuffled passes; endless items are random already and stay in order.

    >>> none = History(0, 1)
    >>> [shuffled(Draw(number=n, num_items=4, seed=0), none) for n in range(8)]
    [1, 2, 0, 3, 1, 3, 2, 0]
    """
    return item_at(draw.number, num_items=draw.num_items, seed=draw.seed)
