"""difficulty-band: mostly items whose mean reward lies within a band, the rest in the shuffled order.

An item near the middle of its rewards has the greatest spread, so its groups teach most.
"""

from __future__ import annotations

import random

from producers.curriculum import Draw, History
from producers.task_order import item_at
from schemas.errors import SettingError
from schemas.seeds import derive_seed


def difficulty_band(
    draw: Draw, history: History, *, low: float = 0.2, high: float = 0.8, explore: float = 0.3, newest: int = 2
) -> int:
    """With probability 1 - `explore` a known item within the band, each alike; else the shuffled order's item.

    An item is within the band if low <= mean reward of its `newest` groups <= high. While none is, the order goes on:
    nothing is left out for good, since exploring reaches every item again.

    >>> from producers.curriculum import Finished
    >>> history = History(memory=8, partitions=1)
    >>> history.saw(0, Finished(0, 3, (1.0, 0.0), 4.0))
    >>> history.saw(0, Finished(1, 1, (1.0, 1.0), 4.0))
    >>> [difficulty_band(Draw(number=n, num_items=9, seed=0), history, explore=0.0) for n in range(2, 6)]
    [3, 3, 3, 3]
    """
    if not low <= high or not 0 <= explore <= 1 or newest < 1:
        raise SettingError(
            f"curriculum 'difficulty-band': low {low}, high {high}, explore {explore}, newest {newest}; "
            "needed: low <= high, 0 <= explore <= 1, newest >= 1"
        )
    rng = random.Random(derive_seed(draw.seed, "difficulty-band", draw.number))
    if rng.random() >= explore and (band := [i for i in history.items() if _within(history, i, low, high, newest)]):
        return rng.choice(band)
    return item_at(draw.number, num_items=draw.num_items, seed=draw.seed)


def _within(history: History, item: int, low: float, high: float, newest: int) -> bool:
    means = [mean for entry in history.of(item)[-newest:] if (mean := entry.mean_reward) is not None]
    return bool(means) and low <= sum(means) / len(means) <= high
