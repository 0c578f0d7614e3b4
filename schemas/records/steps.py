"""What a trainer says: claims (a dispatcher's too), plans, results and announcements of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
    num_tokens: int = 0
    """Trainable tokens of the samples; what `train.tokens` limits."""


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
