"""Which item the n-th group gets: a function of n alone, so that a restart neither skips nor repeats one."""

from __future__ import annotations

import functools
import random

from schemas.seeds import derive_seed


def item_at(position: int, *, num_items: int | None, seed: int, shuffle: bool = True) -> int:
    """Item of position n in the endless sequence of passes over the items, each pass in a seeded order of its own.

    Endless sets (`num_items` None) are gone through as they are: their items are random already.

    >>> [item_at(n, num_items=4, seed=0) for n in range(8)]
    [1, 2, 0, 3, 1, 3, 2, 0]
    >>> [item_at(n, num_items=3, seed=0, shuffle=False) for n in range(5)], item_at(7, num_items=None, seed=0)
    ([0, 1, 2, 0, 1], 7)
    """
    assert position >= 0, position
    if num_items is None:
        return position
    assert num_items > 0, num_items
    number, place = divmod(position, num_items)
    return _order(num_items, seed, number)[place] if shuffle else place


@functools.lru_cache(maxsize=4)
def _order(num_items: int, seed: int, number: int) -> list[int]:
    """Order of one pass."""
    order = list(range(num_items))
    random.Random(derive_seed(seed, "task-order", number)).shuffle(order)
    return order
