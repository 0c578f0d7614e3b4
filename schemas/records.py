"""The records: every word that passes over the log, as frozen plain data.

Per-token arrays are held as packed little-endian bytes (int32 ids, float32 log-probs, bit-packed masks), exactly as
they stand on the wire; `schemas.packing` turns them into numpy views. T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Version(NamedTuple):
    """A set of weights: the trainer's epoch and the number of completed weight-changing steps."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.version}"


class VersionRun(NamedTuple):
    """`count` consecutive sampled tokens made by the weights (epoch, version)."""

    epoch: int
    version: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Role(enum.StrEnum):
    """Who wrote a run of tokens; only SAMPLED tokens may be trained on."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    TOOL = "tool"
    OBSERVATION = "observation"
    UNKNOWN = "unknown"


class Status(enum.StrEnum):
    """How an attempt ended. Only OK, TRUNCATED and INVALID_ACTION may carry a reward."""

    OK = "ok"
    TRUNCATED = "truncated"
    INVALID_ACTION = "invalid_action"
    ENV_ERROR = "env_error"
    GRADER_ERROR = "grader_error"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


REWARDED = frozenset({Status.OK, Status.TRUNCATED, Status.INVALID_ACTION})


class Finish(enum.StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    UNKNOWN = "unknown"


class Segment(NamedTuple):
    """`count` consecutive tokens of one role."""

    role: Role
    count: int  # type: ignore[assignment]  # as above


class Turn(NamedTuple):
    """A sampled turn that is over: the token position in the whole sequence behind it, and why sampling stopped."""

    end: int
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Training needs top_p 1, top_k 0 and min_p 0: a bent distribution has other log-probs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16


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


KEPT = "kept"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A process claims to be the only trainer, or the only dispatcher, of a policy."""

    run: str
    policy: str
    role: str
    epoch: int
    nonce: str
    head_epoch: int = 0
    head_version: int = -1
    """For trainers on `weights`: the newest announcement that this owner inherits; -1 for none."""


class Address(NamedTuple):
    """An outcome on `samples`: partition, offset there, its group's closing offset on `trajectories`, number of trained members."""

    partition: int
    offset: int
    closing_offset: int
    num_members: int


class PlanDrop(NamedTuple):
    """An outcome that a plan sets aside, with the reason and its age in versions (-1 where age does not apply)."""

    partition: int
    offset: int
    closing_offset: int
    num_members: int
    reason: str
    age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one step will eat, written before it is executed. No samples: a plan of drops only, which takes no step."""

    run: str
    policy: str
    epoch: int
    nonce: str
    step: int
    """Number of completed steps when planning = the version current then."""
    samples: tuple[Address, ...]
    drops: tuple[PlanDrop, ...]
    max_age: int
    """Greatest age among the samples; -1 where none is checked."""
    seed: int
    config_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A plan was executed: version `step + 1` now exists."""

    run: str
    policy: str
    epoch: int
    nonce: str
    step: int
    version: int
    digest: str
    """SHA-256 over the new weights (see `trainers.model.weights_digest`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A version's manifest is in the store, whole."""

    run: str
    policy: str
    epoch: int
    nonce: str
    version: int
    manifest_key: str
    manifest_digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be read: its original bytes, its origin and why."""

    run: str
    policy: str
    topic: str
    partition: int
    offset: int
    time_ms: int
    reason: str
    detail: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class DeadReason(enum.StrEnum):
    """Why a record became a dead letter: a closed list."""

    EMPTY = "empty"
    NOT_OURS = "not-ours"
    UNKNOWN_SCHEMA = "unknown-schema"
    UNDECODABLE = "undecodable"
    WRONG_KIND = "wrong-kind"
    WRONG_PLACE = "wrong-place"
    INVALID = "invalid"
    UNKNOWN_STATUS = "unknown-status"
    CORRUPT_BATCH = "corrupt-batch"


class State(enum.StrEnum):
    """What a daemon is doing, in its heartbeat."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A daemon is alive: who, where, with which weights, doing what."""

    run: str
    policy: str
    role: str
    name: str
    session: str
    state: State
    region: str = ""
    inbox: int = -1
    capacity: int = 0
    """Requests that a worker takes at once."""
    running: int = 0
    epoch: int = 0
    version: int = -1
    """The weights in use; -1 for none yet."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaText:
    """A writer's schema, so that older and foreign readers can read its records."""

    name: str
    fingerprint: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """An evaluation of one version on one task set."""

    run: str
    policy: str
    epoch: int
    version: int
    task: str
    environment: str
    split: str
    num_episodes: int
    num_failed: int
    """Episodes without a reward, which no mean counts."""
    mean_reward: float | None
    """Over the episodes with a reward; None, as `low` and `high`, where there is none."""
    low: float | None
    high: float | None
    """Bounds of the mean at 95 % confidence."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Record = (
    Request
    | Trajectory
    | Partial
    | Close
    | Outcome
    | Claim
    | Plan
    | Result
    | Announcement
    | DeadLetter
    | Heartbeat
    | SchemaText
    | Eval
)
