"""Closing: a group closes at the offset of its last missing index, or of the dispatcher's close record, whichever is lower.

Per index the lowest offset wins, whatever the attempt. A trajectory appended later than its index's first request plus
the lifetime is late by itself and opens nothing; a close record for a group with no open member closes nothing; what
arrives for a closed group is late or superseded. No clock is read: only append times on the log, so the same partition
always closes the same groups at the same offsets.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")


class Arrival(enum.StrEnum):
    """What becomes of a trajectory when it arrives."""

    JOINED = "joined"
    LATE = "late"
    SUPERSEDED = "superseded"


class Recent(NamedTuple):
    """A group that closed not long ago: enough to recognise what comes too late for it."""

    group: str
    closing_time_ms: int
    lifetime_ms: int
    indices: frozenset[int]


@dataclass(slots=True)
class OpenGroup(Generic[P]):
    """A group with members and without an end yet."""

    group: str
    size: int
    lifetime_ms: int
    first_offset: int
    """Offset of the first member that joined."""
    first_time_ms: int
    """Its append time."""
    members: dict[int, tuple[int, P]] = field(default_factory=dict)
    """index -> (offset, what the caller keeps of the trajectory)"""


@dataclass(frozen=True, slots=True)
class ClosedGroup(Generic[P]):
    """A group that closed, with its members in order of their index."""

    group: str
    size: int
    members: tuple[tuple[int, int, P], ...]
    """(index, offset, what the caller kept)"""
    closing_offset: int
    closing_time_ms: int
    lifetime_ms: int
    closed_by: str
    """"complete" or "close"."""


class GroupCloser(Generic[P]):
    """A fold over one partition of trajectories, in offset order.

    >>> closer = GroupCloser()
    >>> closer.add("g", size=2, index=0, offset=10, time_ms=5, first_request_time_ms=0, lifetime_ms=50, payload="a")
    (<Arrival.JOINED: 'joined'>, None)
    >>> closer.oldest_open()
    10
    >>> arrival, closed = closer.add(
    ...     "g", size=2, index=1, offset=11, time_ms=6, first_request_time_ms=0, lifetime_ms=50, payload="b")
    >>> closed.closing_offset, closed.closed_by, [payload for _, _, payload in closed.members]
    (11, 'complete', ['a', 'b'])
    >>> closer.add("g", size=2, index=1, offset=12, time_ms=7, first_request_time_ms=0, lifetime_ms=50, payload="c")[0]
    <Arrival.SUPERSEDED: 'superseded'>
    """

    def __init__(self, recent: Iterable[Recent] = ()) -> None:
        self._open: dict[str, OpenGroup[P]] = {}
        self._recent: dict[str, Recent] = {}
        self._forget: deque[tuple[int, str]] = deque()
        for entry in sorted(recent, key=lambda r: r.closing_time_ms):
            self._remember(entry)

    def add(
        self,
        group: str,
        *,
        size: int,
        index: int,
        offset: int,
        time_ms: int,
        first_request_time_ms: int,
        lifetime_ms: int,
        payload: P,
    ) -> tuple[Arrival, ClosedGroup[P] | None]:
        """Take in a trajectory appended at `time_ms`; the group that it completes, if it does."""
        self._purge(time_ms)
        if group in self._recent:
            known = index in self._recent[group].indices
            return (Arrival.SUPERSEDED if known else Arrival.LATE), None
        if time_ms > first_request_time_ms + lifetime_ms:
            return Arrival.LATE, None
        entry = self._open.get(group)
        if entry is None:
            entry = self._open[group] = OpenGroup(group, size, lifetime_ms, offset, time_ms)
        # A member that states another size than the group's first one cannot change where the group closes.
        if index in entry.members or index >= entry.size:
            return Arrival.SUPERSEDED, None
        entry.members[index] = (offset, payload)
        entry.lifetime_ms = max(entry.lifetime_ms, lifetime_ms)
        if len(entry.members) < entry.size:
            return Arrival.JOINED, None
        return Arrival.JOINED, self._end(entry, offset, time_ms, "complete")

    def close(self, group: str, *, offset: int, time_ms: int) -> ClosedGroup[P] | None:
        """Take in a close record; the group that it closed, if it had an open member."""
        self._purge(time_ms)
        entry = self._open.get(group)
        return None if entry is None else self._end(entry, offset, time_ms, "close")

    def oldest_open(self) -> int | None:
        """Offset of the first member of the oldest open group: a position must never pass it. None: nothing is open."""
        return next(iter(self._open.values())).first_offset if self._open else None

    def oldest_open_time_ms(self) -> int | None:
        """Append time of that member."""
        return next(iter(self._open.values())).first_time_ms if self._open else None

    def open_members(self) -> Iterable[tuple[str, int, int, P]]:
        """(group, index, offset, payload) of every member of an open group."""
        for entry in self._open.values():
            for index, (offset, payload) in entry.members.items():
                yield entry.group, index, offset, payload

    @property
    def num_open(self) -> int:
        """Open groups."""
        return len(self._open)

    def _end(self, entry: OpenGroup[P], offset: int, time_ms: int, closed_by: str) -> ClosedGroup[P]:
        del self._open[entry.group]
        self._remember(Recent(entry.group, time_ms, entry.lifetime_ms, frozenset(entry.members)))
        members = tuple((index, at, payload) for index, (at, payload) in sorted(entry.members.items()))
        return ClosedGroup(entry.group, entry.size, members, offset, time_ms, entry.lifetime_ms, closed_by)

    def _remember(self, entry: Recent) -> None:
        self._recent[entry.group] = entry
        self._forget.append((entry.closing_time_ms + entry.lifetime_ms, entry.group))

    def _purge(self, now_ms: int) -> None:
        # First requests precede the closing, so whatever comes a lifetime after the closing is late by itself.
        while self._forget and self._forget[0][0] < now_ms:
            self._recent.pop(self._forget.popleft()[1], None)
