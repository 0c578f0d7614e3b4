"""reward-range: members whose raw reward lies outside what the task could honestly give are not trained on."""

from __future__ import annotations

import math

from consumers.checks import check_range
from schemas.records import Trajectory


def reward_range(trajectory: Trajectory, *, low: float = -math.inf, high: float = math.inf) -> str | None:
    """Return "reward-range" when the reward before shaping is below `low` or above `high`.

    Against exploits that show by their score. The member still counts in its siblings' baseline, as with every filter;
    to bound what it does there, clip it (the shaping `clip-reward`).
    """
    check_range("reward-range", low, high)
    inside = trajectory.reward is not None and low <= trajectory.reward <= high
    return None if inside else "reward-range"
