"""clip-reward: the reward bounded to a range, so that one outlier cannot move a whole group's baseline."""

from __future__ import annotations

import math

from consumers.checks import check_range
from schemas.records import Trajectory


def clip_reward(trajectory: Trajectory, reward: float, *, low: float = -math.inf, high: float = math.inf) -> float:
    """R' = min(max(R, low), high).

    >>> member = None  # only the reward is looked at
    >>> [clip_reward(member, reward, low=-1.0, high=1.0) for reward in (7.5, 0.25, -2.0)]
    [1.0, 0.25, -1.0]
    """
    check_range("clip-reward", low, high)
    return min(max(reward, low), high)
