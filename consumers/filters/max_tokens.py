"""max-tokens: members with more sampled tokens than a limit are not trained on."""

from __future__ import annotations

from schemas.records import Trajectory


def max_tokens(trajectory: Trajectory, *, limit: int) -> str | None:
    """Return "max-tokens" when more than `limit` tokens were sampled over all turns."""
    return "max-tokens" if len(trajectory.logprobs) // 4 > limit else None
