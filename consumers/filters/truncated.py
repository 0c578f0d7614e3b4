"""truncated: answers cut off at their token limit are not trained on (their siblings' baseline keeps them)."""

from __future__ import annotations

from schemas.records import Finish, Status, Trajectory


def truncated(trajectory: Trajectory) -> str | None:
    """Return "truncated" when the status says so, or the last generation ended at its limit."""
    cut = trajectory.status is Status.TRUNCATED or trajectory.finish is Finish.LENGTH
    return "truncated" if cut else None
