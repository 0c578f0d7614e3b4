"""What an environment is: it opens a session for one item and a seed; a session is observed, acted upon and then judged.

`producers.environments` names the ones that come with OffsetRL; one of your own is given as `package.module:name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from schemas.records import Role, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Text that the model reads before it acts; `role` says who wrote it."""

    text: str
    role: Role = Role.PROMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an episode is judged. A failure is not a reward: only OK, TRUNCATED and INVALID_ACTION may carry one."""

    status: Status
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    error: str = ""


class Session(Protocol):
    """One episode."""

    @property
    def done(self) -> bool:
        """Whether no further act is wanted."""
        ...

    def observe(self) -> Observation:
        """What the model reads next; only asked while not done."""
        ...

    def act(self, text: str, truncated: bool) -> None:
        """What the model wrote; `truncated` when it hit its token limit."""
        ...

    def verdict(self) -> Verdict:
        """Asked once, after `done`."""
        ...


class Environment(Protocol):
    """Items and sessions, both pure functions of (settings, item, seed)."""

    num_items: int | None
    """How many items there are; None for endless (generated from the seed)."""

    def payload(self, item: int) -> str:
        """What a worker elsewhere needs to open this item: JSON text, empty when item and seed are enough."""
        ...

    def open(self, item: int, payload: str, seed: int) -> Session:
        """Start an episode."""
        ...
