"""overlong-penalty: a soft penalty for answers near a length limit (DAPO's soft overlong punishment, arXiv 2503.14476)."""

from __future__ import annotations

from consumers.checks import check_not_negative
from schemas.errors import SettingError
from schemas.records import Trajectory


def overlong_penalty(trajectory: Trajectory, reward: float, *, limit: int, cushion: int, factor: float = 1.0) -> float:
    """R' = R + penalty(L), with L the sampled tokens over all turns; the settings are in tokens, `factor` in reward.

    With start = limit - cushion, penalty = 0 up to start, -factor (L - start) / cushion up to `limit`, -factor beyond.
    """
    return reward + penalty(len(trajectory.logprobs) // 4, limit=limit, cushion=cushion, factor=factor)


def penalty(length: int, *, limit: int, cushion: int, factor: float = 1.0) -> float:
    """The penalty of one length in tokens.

    >>> [penalty(length, limit=20, cushion=4) for length in (10, 16, 17, 20, 99)]
    [0.0, 0.0, -0.25, -1.0, -1.0]
    """
    if not 0 < cushion <= limit:
        raise SettingError(f"overlong-penalty: cushion is {cushion} of limit {limit}; it must be 1 to the limit")
    check_not_negative("overlong-penalty", "factor", factor)
    over = length - (limit - cushion)
    return -factor * min(over / cushion, 1.0) if over > 0 else 0.0
