"""What became of a group: its outcome, member by member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.records.words import Segment, Status, VersionRun

KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a closed group inside its outcome."""

    index: int
    attempt: int
    offset: int
    """In the trajectories partition of the same number."""
    status: Status
    disposition: str
    """"kept", or why it is not trained on."""
    reward: float | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    advantage: float = 0.0
    num_tokens: int
    num_sampled: int
    temperature: float
    old_kv: bool = False
    versions: tuple[VersionRun, ...] = ()
    segments: tuple[Segment, ...] = ()
    tokens: bytes = b""
    """Empty unless kept: what is not trained on is not copied."""
    loss_mask: bytes = b""
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one group: its members with advantages, or why it was dropped."""

    run: str
    policy: str
    source_run: str
    source_policy: str
    """Where the trajectories stand; another (run, policy) than the trainer's own means: no age check."""
    partition: int
    group: str
    group_size: int
    task: str
    environment: str
    item: int
    closing_offset: int
    previous: int
    """Closing offset of the outcome before it in this partition; -1 for the first."""
    closing_time_ms: int
    lifetime_ms: int
    """Longest lifetime among its members: how long after closing something may still come for it."""
    closed_by: str
    """"complete" or "close"."""
    disposition: str
    """"kept", or the reason for dropping the whole group."""
    oldest_version: int
    """Least version among the kept members' tokens; -1 when nothing is kept."""
    members: tuple[Member, ...]

    @property
    def kept(self) -> bool:
        """Whether the group waits for a plan."""
        return self.disposition == KEPT
