"""What a dispatcher knows, folded from the log: pure, and the same whatever order the topics are read in.

Times called `now_s` are seconds of any steady clock, times called `_ms` append times.
"""

from __future__ import annotations

from dataclasses import dataclass

from producers.curriculum import Finished, History
from producers.groups import Asked, Group, Stray, Worker, group_number
from producers.lengths import Predictions
from producers.numbers import Numbers
from producers.resuming import Chunks
from schemas.records import Close, Outcome, Partial, Request, Trajectory
from schemas.rules.chain import Chain
from schemas.rules.ending import StopAt
from schemas.rules.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that decide."""

    group_size: int
    capacity_groups: int
    batch_groups: int
    max_staleness: int
    stop_at: StopAt
    reissue_after_s: float
    heartbeat_timeout_s: float
    memory_groups: int = 0
    """Newest outcomes that are remembered by item."""
    requires: frozenset[str] = frozenset()
    """Tags that a worker must have."""


class DispatchFold:
    """Requests, trajectories, partials, outcomes, steps and heartbeats go in."""

    def __init__(self, limits: Limits, partitions: int) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self.groups: dict[str, Group] = {}
        """Running groups."""
        self.backlog: dict[tuple[int, int], None] = {}
        """(partition, closing offset) of kept outcomes that no plan has named."""
        self.workers: dict[str, Worker] = {}
        """By session."""
        self.strays: dict[str, Stray] = {}
        """Open groups that were never validly asked for, by name."""
        self.numbers = Numbers()
        self.history = History(limits.memory_groups, partitions)
        self.predictions = Predictions()
        self.kept = self.dropped = self.void_groups = 0
        self.chains = {partition: Chain() for partition in range(partitions)}
        self._chunks: dict[str, dict[int, Chunks]] = {}
        self._closed_ms: dict[str, int] = {}
        """Newest close record of groups that have not ended."""
        self._next = 0
        self._live = False
        self._newest_ms = 0

    @property
    def next_number(self) -> int:
        """Number of the next group asked for."""
        return self.numbers.fresh(self._taken())

    # What the log says ---------------------------------------------------------------------------------------------

    def saw_time(self, time_ms: int) -> None:
        """Some record was appended at `time_ms`."""
        self._newest_ms = max(self._newest_ms, time_ms)

    def saw_request(self, request: Request, time_ms: int, now_s: float) -> None:
        """A request of a valid dispatcher, appended at `time_ms`."""
        self._number(request.group)
        number = group_number(request.group)
        if number is None or self.numbers.is_over(number):
            return
        group = self.groups.setdefault(request.group, Group(number, request.group_size))
        group.item = request.item
        group.min_version = max(group.min_version, request.min_version)
        group.lifetime_ms = max(group.lifetime_ms, request.lifetime_ms)
        first = request.first_request_time_ms or time_ms
        known = group.asked.get(request.index)
        if known is None:
            known = group.asked[request.index] = Asked(request.attempt, request.session, first, now_s, now_s, time_ms)
        elif request.attempt >= known.attempt:
            known.attempt, known.session = request.attempt, request.session
            known.asked_s, known.asked_ms = now_s, time_ms
        known.resumes[request.attempt] = request.resume
        # Topics are read in no order between them: its trajectory may have been read before the request.
        if stray := self.strays.get(request.group):
            known.arrived |= request.index in stray.indices
            group.closing |= stray.closing
            stray.indices.discard(request.index)
            if not stray.indices:
                del self.strays[request.group]

    def caught_up(self, now_s: float, *, known_from: int | None = 0) -> None:
        """History is read: ages of members and workers follow from append times, and what is outstanding is counted.

        `known_from`: everything about this group number and those above was read. None: retention or a missing
        position may have taken something, so that a number without any trace is not known to be unused.
        """
        for worker in self.workers.values():
            worker.seen_s = now_s - self._age_s(worker.seen_ms)
        for group in self.groups.values():
            for asked in group.asked.values():
                asked.first_s = now_s - self._age_s(asked.first_request_time_ms)
                asked.asked_s = now_s - self._age_s(asked.asked_ms)
        if known_from is None:
            self.numbers.end_all_but(self._taken(), self._next)
        else:
            self.numbers.raise_floor(known_from)
        self._live = True
        for name in list(self._closed_ms):
            self._void(name)
        self.count_outstanding()

    def count_outstanding(self) -> None:
        """Count for each worker the members asked of it that have not arrived."""
        for worker in self.workers.values():
            worker.outstanding = 0
        for group in self.groups.values():
            for asked in group.asked.values():
                if not asked.arrived and (busy := self.workers.get(asked.session)):
                    busy.outstanding += 1

    def saw_trajectory(self, trajectory: Trajectory, time_ms: int, offset: int = 0) -> None:
        """A finished, valid attempt stands on the log, appended at `time_ms`; one that is late by itself opens nothing."""
        self._number(trajectory.group)
        late = time_ms > trajectory.first_request_time_ms + trajectory.lifetime_ms
        if late or self._is_over(trajectory.group):
            return
        group = self.groups.get(trajectory.group)
        asked = group.asked.get(trajectory.index) if group else None
        if asked is None and trajectory.group_size == 1 and group_number(trajectory.group) is None:
            return  # a demonstration: it was never to be asked for, and its group ends with it
        if asked is None:
            stray = self.strays.setdefault(trajectory.group, Stray(trajectory.partition, offset))
            stray.indices.add(trajectory.index)
        elif not asked.arrived:
            asked.arrived = True
            self._release(asked)

    def saw_partial(self, partial: Partial, offset: int, now_s: float) -> None:
        """A chunk of an unfinished attempt stands at `offset`."""
        number = group_number(partial.group)
        if number is None or self.numbers.is_over(number):
            return
        chunks = self._chunks.setdefault(partial.group, {}).setdefault(partial.index, Chunks())
        group = self.groups.get(partial.group)
        asked = group.asked.get(partial.index) if group else None
        if chunks.saw(offset, partial) and asked is not None and asked.attempt == partial.attempt:
            asked.asked_s = max(asked.asked_s, now_s)  # it goes forward: not overdue

    def saw_close(self, close: Close, time_ms: int) -> None:
        """A close record stands on the log; it ends what is open there.

        Where no member arrived before it, it closes nothing: the group is over only if nothing but late members can
        still come.
        """
        if self._is_over(close.group):
            return
        self._closed_ms[close.group] = max(self._closed_ms.get(close.group, 0), time_ms)
        if stray := self.strays.get(close.group):
            stray.closing = True
        if group := self.groups.get(close.group):
            group.closing = group.opened or close.group in self.strays
        if self._live:
            self._void(close.group)

    def saw_outcome(self, partition: int, outcome: Outcome) -> bool:
        """An outcome stands on the log; only what continues the chain counts: whether this one does."""
        chain = self.chains.get(partition)
        if chain is None or outcome.partition != partition:
            return False
        if not chain.take(outcome.previous, outcome.closing_offset):
            return False
        self._number(outcome.group)
        self._finished(partition, outcome)
        self._end(outcome.group)
        if not outcome.kept:
            self.dropped += 1
            return True
        self.kept += 1
        if not self.ledger.named(outcome.partition, outcome.closing_offset):
            self.backlog[(outcome.partition, outcome.closing_offset)] = None
        return True

    def saw_step(self, offset: int, record: object, time_ms: int) -> None:
        """A record of `steps`, appended at `time_ms`."""
        if not self.ledger.take(offset, record, time_ms):
            return
        samples, drops = getattr(record, "samples", ()), getattr(record, "drops", ())
        for address in (*samples, *drops):
            self.backlog.pop((address.partition, address.closing_offset), None)

    def saw_worker(self, worker: Worker, left: bool) -> None:
        """A heartbeat of a rollout worker."""
        for session in [s for s, w in self.workers.items() if w.name == worker.name and s != worker.session]:
            del self.workers[session]  # a fresh session of the same name: the old one is gone
        if left:
            self.workers.pop(worker.session, None)
            return
        known = self.workers.get(worker.session)
        if known is None:
            self.workers[worker.session] = worker
            self.count_outstanding()
        else:
            worker.outstanding = known.outstanding
            self.workers[worker.session] = worker

    # Inside --------------------------------------------------------------------------------------------------------

    def _taken(self) -> set[int]:
        """Numbers of groups that are running or stray."""
        strays = {number for name in self.strays if (number := group_number(name)) is not None}
        return {group.number for group in self.groups.values()} | strays

    def _number(self, name: str) -> None:
        number = group_number(name)
        if number is not None:
            self._next = max(self._next, number + 1)

    def _is_over(self, name: str) -> bool:
        number = group_number(name)
        return number is not None and self.numbers.is_over(number)

    def _age_s(self, time_ms: int) -> float:
        return max(0.0, (self._newest_ms - time_ms) / 1000)

    def _finished(self, partition: int, outcome: Outcome) -> None:
        number = group_number(outcome.group)
        if number is None:
            return
        lengths = [member.num_sampled for member in outcome.members]
        rewards = tuple(member.reward for member in outcome.members if member.reward is not None)
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        self.history.saw(partition, Finished(number, outcome.item, rewards, mean))
        if group := self.groups.get(outcome.group):
            self.predictions.came(group.predicted, mean)

    def _void(self, name: str) -> None:
        """End a group that was closed without members, when nothing but late ones can still come."""
        group = self.groups.get(name)
        if group is None or group.missing or group.opened or name in self.strays:
            return
        time_ms = self._closed_ms[name]
        if all(time_ms > asked.first_request_time_ms + group.lifetime_ms for asked in group.asked.values()):
            self.void_groups += 1
            self._end(name)

    def _end(self, name: str) -> None:
        group = self.groups.pop(name, None)
        self.strays.pop(name, None)
        self._chunks.pop(name, None)
        self._closed_ms.pop(name, None)
        if (number := group_number(name)) is not None:
            self.numbers.end(number)
        for asked in group.asked.values() if group else ():
            if not asked.arrived:
                self._release(asked)

    def _release(self, asked: Asked) -> None:
        if worker := self.workers.get(asked.session):
            worker.outstanding = max(0, worker.outstanding - 1)
