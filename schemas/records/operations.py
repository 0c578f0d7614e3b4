"""What is said about a run beside its loop: dead letters, heartbeats, schemas and evaluations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


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
