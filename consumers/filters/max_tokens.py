"""max-tokens: members with more sampled tokens than a limit are not trained on."""

from __future__ import annotations

from schemas.errors import SettingError
from schemas.records import Trajectory


def max_tokens(trajectory: Trajectory, *, limit: int) -> str | None:
    """Return "max-tokens" when more than `limit` tokens were sampled over all turns."""
    if limit < 1:
        raise SettingError(f"max-tokens: limit is {limit}; it must be 1 or more")
    return "max-tokens" if len(trajectory.logprobs) // 4 > limit else None
