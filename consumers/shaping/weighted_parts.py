"""weighted-parts: the reward as a weighted sum of its named parts, in place of the environment's own sum."""

from __future__ import annotations

import math

from consumers.checks import check_coefficients
from schemas.errors import SettingError
from schemas.records import Trajectory


def weighted_parts(trajectory: Trajectory, reward: float, *, parts: dict[str, float]) -> float:
    """R' = sum over parts k of c_k R_k, with the coefficients c_k by name; parts not named count nothing.

    A part that the member lacks raises, and its group is dropped: a missing measurement is not a 0. Give this shaper
    first: what an earlier one did to the reward is lost.

    >>> from types import SimpleNamespace
    >>> member = SimpleNamespace(reward_parts={"accuracy": 1.0, "format": 0.5})
    >>> weighted_parts(member, 1.5, parts={"accuracy": 1.0, "format": 0.25})
    1.125
    """
    if not parts:
        raise SettingError("weighted-parts: parts is empty; give a coefficient for each part, as { accuracy = 1.0 }")
    check_coefficients("weighted-parts", parts)
    missing = sorted(parts.keys() - trajectory.reward_parts.keys())
    if missing:
        raise ValueError(f"weighted-parts: the member has no part {missing}; it has {sorted(trajectory.reward_parts)}")
    return math.fsum(coefficient * trajectory.reward_parts[name] for name, coefficient in parts.items())
