"""Where a run ends: after so many steps, tokens or hours, whichever comes first, by what stands on `steps` alone.

Steps and tokens are those of effective plans; hours go from the append time of the first claim to that of the newest
plan. So a run ends at a plan, at the same one for every reader and after every restart. A trainer that starves when its
hours are over appends a plan that names nothing.
"""

from __future__ import annotations

from typing import NamedTuple

_HOUR_MS = 3_600_000


class StopAt(NamedTuple):
    """The limits of a run; 0: none of that kind."""

    steps: int = 0
    tokens: int = 0
    """Trainable tokens of the planned samples."""
    hours: float = 0.0
    """Since the first claim."""


def run_ended(stop_at: StopAt, *, steps: int, tokens: int, lasted_ms: float) -> str:
    """Which limit has been reached ("steps", "tokens", "hours"); "" while the run goes on.

    steps, tokens: of all effective plans; lasted_ms: from the first claim to the newest plan.

    >>> run_ended(StopAt(tokens=1000, hours=2.0), steps=7, tokens=999, lasted_ms=7_199_999)
    ''
    >>> run_ended(StopAt(tokens=1000, hours=2.0), steps=8, tokens=1010, lasted_ms=7_199_999)
    'tokens'
    >>> run_ended(StopAt(hours=2.0), steps=7, tokens=999, lasted_ms=7_200_000)
    'hours'
    """
    if stop_at.steps and steps >= stop_at.steps:
        return "steps"
    if stop_at.tokens and tokens >= stop_at.tokens:
        return "tokens"
    if stop_at.hours and lasted_ms >= stop_at.hours * _HOUR_MS:
        return "hours"
    return ""
