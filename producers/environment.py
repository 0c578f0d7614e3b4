"""What an environment is: it opens a session for one item and a seed; a session is observed, acted upon and then judged.

`producers.environments` names the ones that come with OffsetRL; one of your own is given as `package.module:name`.

Sessions run away from the engine's thread, many at once, the calls of one session one after the other; `open` may be
called from several threads at a time. Each method but `payload` may be `async def`; sessions with such methods share one
event loop, which their plain methods must not hold up. Every call has a time limit (`rollout.tool_timeout_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from schemas.records import Role, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Text that the model reads before it acts; `role` says who wrote it: PROMPT, TOOL or OBSERVATION."""

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


def rebuildable(environment: object) -> bool:
    """Whether the environment says that its sessions can be built anew by the same acts."""
    return getattr(environment, "rebuildable", False) is True


class Session(Protocol):
    """One episode of one or several turns: observe, act, observe, act, ... until done; then a verdict."""

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
    """Items and sessions, both pure functions of (settings, item, seed).

    An attribute `rebuildable = True` says that a session is a pure function of (settings, item, seed) and of the acts so
    far: another worker may build it anew by the same acts, and go on with an episode where its first worker left it.
    Without it an unfinished episode begins anew.
    """

    num_items: int | None
    """How many items there are; None for endless (generated from the seed)."""

    def payload(self, item: int) -> str:
        """What a worker elsewhere needs to open this item: JSON text, empty when item and seed are enough."""
        ...

    def open(self, item: int, payload: str, seed: int) -> Session:
        """Start an episode."""
        ...
