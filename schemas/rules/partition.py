"""One partition in a processor's hands: closing, chain and position as one pure state that is rebuilt from the log.

Assigning: make a `PartitionState` from the committed position and its note, feed it the outcomes that stand on `samples`
from `read_from` on (`read_back`), then the trajectories from `position` on (`add`, `close`). Each call that ends a group
gives a `Due`: the outcome that must be written next, already chained, or None when it stands on the log. After the
outcome is acknowledged (`acknowledged`), `committable` says which position may be stored, with which note.
Any error or revocation: throw the state away and assign again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from schemas.records import Outcome
from schemas.rules.chain import NONE, Chain, ReadBack
from schemas.rules.closing import Arrival, ClosedGroup, GroupCloser, Recent

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Due(Generic[P]):
    """An outcome to be written: the closed group, and the closing offset before it in the chain."""

    closed: ClosedGroup[P]
    previous: int


class _Written(NamedTuple):
    offset: int
    previous: int
    until_ms: int


class PartitionState(Generic[P]):
    """What a processor keeps of one partition of trajectories and its outcome partition.

    `position` is where to read trajectories from; `start_time_ms` the append time of the record there (0: unknown, then
    every outcome read back is remembered).
    """

    def __init__(self, position: int, note: ReadBack | None = None, start_time_ms: int = 0) -> None:
        self.position = position
        self._note = note
        self._start_time_ms = start_time_ms
        self._chain = Chain(note.last if note else NONE)
        self._began = note is not None
        self._recent: list[Recent] = []
        self._closer: GroupCloser[P] | None = None
        self._written: deque[_Written] = deque()
        self._in_flight = 0
        self._due = NONE
        self._now_ms = start_time_ms

    @property
    def read_from(self) -> int | None:
        """Offset on `samples` to read back from; None: from its start."""
        return self._note.offset if self._note else None

    @property
    def last(self) -> int:
        """Closing offset of the newest outcome known to stand on the log."""
        return self._chain.last

    def read_back(self, offset: int, outcome: Outcome) -> bool:
        """Take in an outcome that stands on `samples` at `offset`; True if it counts."""
        assert self._closer is None, "outcomes are read back before the first trajectory"
        if not self._began and outcome.previous != NONE:
            # Retention took the chain's beginning: the first outcome still there is where it goes on.
            self._chain.last = outcome.previous
        self._began = True
        if not self._chain.take(outcome.previous, outcome.closing_offset):
            return False
        self._written.append(_Written(offset, outcome.previous, outcome.closing_time_ms + outcome.lifetime_ms))
        if outcome.closing_time_ms + outcome.lifetime_ms >= self._start_time_ms:
            indices = frozenset(member.index for member in outcome.members)
            self._recent.append(Recent(outcome.group, outcome.closing_time_ms, outcome.lifetime_ms, indices))
        return True

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
    ) -> tuple[Arrival, Due[P] | None]:
        """Take in the trajectory at `offset`; the outcome that becomes due by it."""
        arrival, closed = self._groups(offset, time_ms).add(
            group,
            size=size,
            index=index,
            offset=offset,
            time_ms=time_ms,
            first_request_time_ms=first_request_time_ms,
            lifetime_ms=lifetime_ms,
            payload=payload,
        )
        return arrival, self._make_due(closed)

    def close(self, group: str, *, offset: int, time_ms: int) -> Due[P] | None:
        """Take in the close record at `offset`; the outcome that becomes due by it."""
        return self._make_due(self._groups(offset, time_ms).close(group, offset=offset, time_ms=time_ms))

    def skip(self, offset: int, time_ms: int) -> None:
        """Pass over a record that is neither trajectory nor close record (it is dead-lettered by the caller)."""
        self._groups(offset, time_ms)

    def acknowledged(self, due: Due[P], offset: int) -> None:
        """The outcome of `due` stands on `samples` at `offset`; acknowledgements come in the order of writing."""
        took = self._chain.take(due.previous, due.closed.closing_offset)
        assert took, (due.previous, due.closed.closing_offset, self._chain.last)
        self._in_flight -= 1
        until_ms = due.closed.closing_time_ms + due.closed.lifetime_ms
        self._written.append(_Written(offset, due.previous, until_ms))

    def committable(self) -> tuple[int, ReadBack] | None:
        """The position that may be stored, with its note; None while an outcome is on its way.

        It never passes the first offset of the oldest open group, and the note reaches back over every outcome whose
        group something may still come for.
        """
        if self._in_flight:
            return None
        position, horizon_ms = self.position, self._now_ms
        if self._closer is not None and (oldest := self._closer.oldest_open()) is not None:
            position, horizon_ms = oldest, self._closer.oldest_open_time_ms() or 0
        while len(self._written) > 1 and self._written[0].until_ms < horizon_ms:
            self._written.popleft()
        if not self._written:
            return position, ReadBack(0, NONE)
        return position, ReadBack(self._written[0].offset, self._written[0].previous)

    @property
    def num_open(self) -> int:
        """Groups that wait for members."""
        return self._closer.num_open if self._closer else 0

    def open_payloads(self) -> Iterable[P]:
        """What is held for open groups."""
        return (payload for *_, payload in self._closer.open_members()) if self._closer else ()

    def _groups(self, offset: int, time_ms: int) -> GroupCloser[P]:
        if self._closer is None:
            self._closer = GroupCloser(self._recent)
            self._due = self._chain.last
        assert offset >= self.position, (offset, self.position)
        self.position = offset + 1
        self._now_ms = time_ms
        return self._closer

    def _make_due(self, closed: ClosedGroup[P] | None) -> Due[P] | None:
        if closed is None or closed.closing_offset <= self._due:
            return None  # nothing closed, or its outcome stands on the log already
        due = Due(closed, self._due)
        self._due = closed.closing_offset
        self._in_flight += 1
        return due
