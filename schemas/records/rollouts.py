"""What passes between dispatcher, workers and processors: requests, trajectories, partials and closes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.records.words import Finish, Sampling, Segment, Status, Turn, VersionRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout wanted, in a worker's inbox."""

    run: str
    policy: str
    epoch: int
    nonce: str
    group: str
    group_size: int
    index: int
    attempt: int
    partition: int
    task: str
    environment: str
    item: int
    payload: str
    seed: int
    sampling: Sampling
    min_version: int
    lifetime_ms: int
    first_request_time_ms: int
    """Append time of this index's first request; 0 on a first request (its own append time counts)."""
    worker: str
    session: str
    resume: tuple[int, ...] = ()
    """Offsets in this partition of `partials`, in order: the chunks of the earlier attempt to go on from; () starts anew."""

    @property
    def id(self) -> str:
        """Name of this attempt: group/index/attempt."""
        return f"{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished attempt, token for token."""

    run: str
    policy: str
    group: str
    group_size: int
    index: int
    attempt: int
    partition: int
    task: str
    environment: str
    item: int
    seed: int
    first_request_time_ms: int
    lifetime_ms: int
    sampling: Sampling
    model: str
    tokenizer: str
    """Hex digest of the tokenizer's files, as the manifest of version 0 names it."""
    status: Status
    finish: Finish
    reward: float | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    error: str = ""
    worker: str
    session: str
    region: str
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name."""
    old_kv: bool = False
    """Whether tokens after a weight swap were sampled over keys and values of older weights."""
    resumed_tokens: int = 0
    """Sampled tokens, the first ones, taken over from partials of earlier attempts."""
    versions: tuple[VersionRun, ...]
    """Counts sum to S."""
    segments: tuple[Segment, ...]
    """Counts sum to T."""
    tokens: bytes
    """int32 [T]"""
    loss_mask: bytes
    """bits [T]; 0 wherever the role is not SAMPLED"""
    logprobs: bytes
    """float32 [S], of the distribution really sampled from"""

    @property
    def id(self) -> str:
        """Name of this attempt: group/index/attempt."""
        return f"{self.group}/{self.index}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A chunk of an unfinished attempt, for whoever goes on with it; never counted as produced.

    The chunks of one attempt by one session begin at 0 and follow one another, each where the one before it ends.
    T = tokens of the chunk, S = sampled tokens of it.
    """

    run: str
    policy: str
    group: str
    index: int
    attempt: int
    partition: int
    worker: str
    session: str
    start: int
    """Position in the whole sequence of the chunk's first token."""
    old_kv: bool = False
    turns: tuple[Turn, ...] = ()
    """Sampled turns that ended since the chunk before: what a session is rebuilt from."""
    versions: tuple[VersionRun, ...]
    """Counts sum to S."""
    segments: tuple[Segment, ...]
    """Counts sum to T."""
    tokens: bytes
    """int32 [T]"""
    loss_mask: bytes
    """bits [T]"""
    logprobs: bytes
    """float32 [S], of the distribution really sampled from"""

    @property
    def id(self) -> str:
        """Name of the attempt: group/index/attempt."""
        return f"{self.group}/{self.index}/{self.attempt}"

    @property
    def end(self) -> int:
        """Position in the whole sequence behind the chunk's last token."""
        return self.start + len(self.tokens) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The dispatcher's word that a group gets no further members."""

    run: str
    policy: str
    epoch: int
    nonce: str
    group: str
    partition: int
    reason: str
