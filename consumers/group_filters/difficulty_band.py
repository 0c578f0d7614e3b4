"""difficulty-band: a group whose mean raw reward lies outside a range is too hard or too easy to learn much from."""

from __future__ import annotations

import math

from consumers.checks import check_range
from consumers.group_rewards import GroupRewards


def difficulty_band(group: GroupRewards, *, low: float = -math.inf, high: float = math.inf) -> str | None:
    """Return "too-hard" when mean < low, "too-easy" when mean > high; both bounds are kept themselves.

    The mean is of the rewards before shaping: with rewards of 0 and 1 it is the pass rate of the item.

    >>> [difficulty_band(GroupRewards.of(r), low=0.25, high=0.75) for r in ([1, 0], [0, 0], [1, 1], [1, 0, 0, 0])]
    [None, 'too-hard', 'too-easy', None]
    """
    check_range("difficulty-band", low, high)
    mean = math.fsum(group.raw) / len(group.raw)  # exact sum: the same at a bound whatever the order of members
    if mean < low:
        return "too-hard"
    return "too-easy" if mean > high else None
