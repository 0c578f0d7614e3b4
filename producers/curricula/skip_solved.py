"""skip-solved: shuffled, but an item whose newest groups were all right rests for a while.

Groups without spread in their rewards teach nothing (their advantages are 0), so rollouts of solved items are wasted.
"""

from __future__ import annotations

import random

from producers.curriculum import Draw, Finished, History
from producers.task_order import item_at
from schemas.errors import SettingError
from schemas.seeds import derive_seed

_TRIES = 64


def skip_solved(draw: Draw, history: History, *, times: int = 2, reward: float = 1.0, rest_groups: int = 500) -> int:
    """The shuffled order's item; another one, drawn by the seed, while that one rests.

    An item rests while its newest `times` groups were right in every member (reward >= `reward`, none failed to be
    judged) and the newest of them is less than `rest_groups` groups ago. Where everything rests, the order's item is
    taken. `rest_groups` above `task.memory_groups` has no effect beyond that memory.

    >>> history = History(memory=8, partitions=1)
    >>> for number in (0, 1):
    ...     history.saw(0, Finished(number, 2, (1.0, 1.0), 4.0))
    >>> [skip_solved(Draw(number=n, num_items=3, seed=1), history) for n in range(2, 8)]
    [1, 0, 1, 1, 1, 0]
    """
    if times < 1 or rest_groups < 1:
        raise SettingError(
            f"curriculum 'skip-solved': times is {times} and rest_groups {rest_groups}; both must be 1 or more"
        )
    wanted = item_at(draw.number, num_items=draw.num_items, seed=draw.seed)
    if draw.num_items is None or not _rests(history, wanted, draw.number, times, reward, rest_groups):
        return wanted  # endless items do not come back
    rng = random.Random(derive_seed(draw.seed, "skip-solved", draw.number))
    for _ in range(_TRIES):
        item = rng.randrange(draw.num_items)
        if not _rests(history, item, draw.number, times, reward, rest_groups):
            return item
    return wanted


def _rests(history: History, item: int, number: int, times: int, reward: float, rest_groups: int) -> bool:
    newest = history.of(item)[-times:]
    return len(newest) == times and number - newest[-1].number < rest_groups and all(_solved(e, reward) for e in newest)


def _solved(entry: Finished, reward: float) -> bool:
    return bool(entry.rewards) and min(entry.rewards) >= reward
