"""overlong: members that are too long in all, prompt and tool output included, are not trained on."""

from __future__ import annotations

from schemas.errors import SettingError
from schemas.records import Trajectory


def overlong(trajectory: Trajectory, *, limit: int) -> str | None:
    """Return "overlong" when the whole sequence has more than `limit` tokens: what a trainer's memory has to hold.

    `max-tokens` counts the sampled ones alone; a soft penalty instead of a limit is the shaping `overlong-penalty`.
    """
    if limit < 1:
        raise SettingError(f"overlong: limit is {limit}; it must be 1 or more")
    return "overlong" if len(trajectory.tokens) // 4 > limit else None
