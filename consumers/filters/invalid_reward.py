"""invalid-reward: a failure is not a reward. The pipeline applies this filter first, always."""

from __future__ import annotations

import math

from schemas.records import REWARDED, Trajectory

NO_REWARD = "no-reward"
NON_FINITE = "non-finite-reward"
NO_TOKENS = "no-tokens"


def invalid_reward(trajectory: Trajectory) -> str | None:
    """The status of a failed attempt, "no-reward", "non-finite-reward" or "no-tokens"; None for a valid member."""
    if trajectory.status not in REWARDED:
        return str(trajectory.status)
    if trajectory.reward is None:
        return NO_REWARD
    if not math.isfinite(trajectory.reward):
        return NON_FINITE
    if not trajectory.logprobs:
        return NO_TOKENS
    return None
