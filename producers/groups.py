"""What a dispatcher knows of workers, of the groups it asked for and of those that it did not. Plain data.

Times called `_s` are seconds of any steady clock, times called `_ms` append times on the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Worker:
    """A live session of a rollout worker."""

    name: str
    session: str
    inbox: int
    capacity: int
    seen_s: float
    seen_ms: int = 0
    """Append time of its newest heartbeat."""
    outstanding: int = 0
    """Members asked of it and not arrived."""
    tags: frozenset[str] = frozenset()
    """What it can do, as its settings say."""
    draining: bool = False
    """It finishes what it has and takes nothing more."""


@dataclass(slots=True)
class Asked:
    """One member of a group: how often it was asked for, of whom, and whether it arrived."""

    attempt: int
    session: str
    first_request_time_ms: int
    first_s: float
    """When it was first asked for."""
    asked_s: float
    """When it was last asked for."""
    asked_ms: int = 0
    """Append time of its newest request."""
    arrived: bool = False
    resumes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Attempt -> the chunks that its request named."""


@dataclass(slots=True)
class Group:
    """A group that was asked for and has not closed."""

    number: int
    group_size: int
    asked: dict[int, Asked] = field(default_factory=dict)
    min_version: int = 0
    lifetime_ms: int = 0
    """Longest of its requests."""
    closing: bool = False
    """A close record was written for it."""
    item: int = -1
    """Item of its task; -1 until it is chosen."""
    predicted: float | None = None
    """Sampled tokens per member that it was thought to take."""

    @property
    def name(self) -> str:
        """Group id.

        >>> Group(7, 4).name
        'g00000007'
        """
        return group_name(self.number)

    @property
    def missing(self) -> list[int]:
        """Indices never asked for: a dispatcher died between two writes."""
        return [index for index in range(self.group_size) if index not in self.asked]

    @property
    def opened(self) -> bool:
        """Whether a member stands on the log, so that the group needs an end there."""
        return any(asked.arrived for asked in self.asked.values())


@dataclass(slots=True)
class Stray:
    """Members of a group that no valid request is known for: asked for by a superseded dispatcher, or read too early."""

    partition: int
    offset: int
    """Of the first member seen."""
    indices: set[int] = field(default_factory=set)
    closing: bool = False


def group_name(number: int) -> str:
    """Group id of a running number."""
    return f"g{number:08d}"


def group_number(name: str) -> int | None:
    """Running number of a group id; None for a stranger's.

    >>> group_number("g00000012"), group_number("other")
    (12, None)
    """
    return int(name[1:]) if name.startswith("g") and name[1:].isdigit() else None
