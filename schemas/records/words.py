"""The words that records are made of: versions, roles, statuses, runs of tokens, sampling."""

from __future__ import annotations

import enum
from dataclasses import dataclass
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
