"""What a dispatcher knows, folded from the log, and what it decides from it: pure, without clock, network or settings object.

Times called `now_s` are seconds of any steady clock. Deadlines are decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from producers.groups import Asked, Group, Stray, Worker, group_number
from schemas.records import Close, Outcome, Request, Trajectory
from schemas.rules import admission
from schemas.rules.chain import Chain
from schemas.rules.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that decide."""

    group_size: int
    capacity_groups: int
    batch_groups: int
    max_staleness: int
    steps: int
    reissue_after_s: float
    heartbeat_timeout_s: float


class DispatchState:
    """The fold: requests, trajectories, outcomes, steps and heartbeats go in; what to ask, re-issue and close comes out."""

    def __init__(self, limits: Limits, partitions: int) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self.groups: dict[str, Group] = {}
        """Running groups, oldest first."""
        self.backlog: dict[tuple[int, int], None] = {}
        """(partition, closing offset) of kept outcomes that no plan has named."""
        self.workers: dict[str, Worker] = {}
        """By session."""
        self.strays: dict[str, Stray] = {}
        """Open groups that were never validly asked for, by name."""
        self.next_number = 0
        self.kept = self.dropped = self.void_groups = 0
        self._chains = {partition: Chain() for partition in range(partitions)}
        self._closed: set[str] = set()
        self._newest_ms = 0

    # What the log says ---------------------------------------------------------------------------------------------

    def saw_time(self, time_ms: int) -> None:
        """Some record was appended at `time_ms`."""
        self._newest_ms = max(self._newest_ms, time_ms)

    def saw_request(self, request: Request, time_ms: int, now_s: float) -> None:
        """A request of a valid dispatcher, appended at `time_ms`."""
        self._number(request.group)
        number = group_number(request.group)
        if request.group in self._closed or number is None:
            return
        group = self.groups.setdefault(request.group, Group(number, request.group_size))
        group.min_version = max(group.min_version, request.min_version)
        group.lifetime_ms = max(group.lifetime_ms, request.lifetime_ms)
        first = request.first_request_time_ms or time_ms
        known = group.asked.get(request.index)
        if known is None:
            known = group.asked[request.index] = Asked(request.attempt, request.session, first, now_s, now_s)
        elif not known.arrived and request.attempt >= known.attempt:
            known.attempt, known.session, known.asked_s = request.attempt, request.session, now_s
        # Topics are read in no order between them: its trajectory may have been read before the request.
        if stray := self.strays.get(request.group):
            known.arrived |= request.index in stray.indices
            group.closing |= stray.closing
            stray.indices.discard(request.index)
            if not stray.indices:
                del self.strays[request.group]

    def caught_up(self, now_s: float) -> None:
        """History is read: set ages of members and workers by append times, and count again what is outstanding."""
        for worker in self.workers.values():
            worker.seen_s = now_s - max(0.0, (self._newest_ms - worker.seen_ms) / 1000)
        for group in self.groups.values():
            for asked in group.asked.values():
                asked.first_s = now_s - max(0.0, (self._newest_ms - asked.first_request_time_ms) / 1000)
                asked.asked_s = asked.first_s
        self.count_outstanding()

    def count_outstanding(self) -> None:
        """Count for each worker the members asked of it that have not arrived."""
        for worker in self.workers.values():
            worker.outstanding = 0
        for group in self.groups.values():
            for asked in group.asked.values():
                if not asked.arrived and (busy := self.workers.get(asked.session)):
                    busy.outstanding += 1

    def saw_trajectory(self, trajectory: Trajectory, time_ms: int) -> None:
        """A finished, valid attempt stands on the log, appended at `time_ms`; one that is late by itself opens nothing."""
        self._number(trajectory.group)
        if time_ms > trajectory.first_request_time_ms + trajectory.lifetime_ms or trajectory.group in self._closed:
            return
        group = self.groups.get(trajectory.group)
        asked = group.asked.get(trajectory.index) if group else None
        if asked is None:
            stray = self.strays.setdefault(trajectory.group, Stray(trajectory.partition))
            stray.indices.add(trajectory.index)
        elif not asked.arrived:
            asked.arrived = True
            self._release(asked)

    def saw_close(self, close: Close, time_ms: int) -> None:
        """A close record stands on the log; it ends what is open there.

        Where no member arrived before it, it closes nothing: the group is over only if nothing but late members can
        still come.
        """
        if stray := self.strays.get(close.group):
            stray.closing = True
        group = self.groups.get(close.group)
        if group is None:
            return
        group.closing = group.opened or close.group in self.strays
        over = all(time_ms > asked.first_request_time_ms + group.lifetime_ms for asked in group.asked.values())
        if not group.closing and over and not group.missing:
            self.void_groups += 1
            self._end(close.group)

    def saw_outcome(self, partition: int, outcome: Outcome) -> None:
        """An outcome stands on the log; only what continues the chain counts."""
        chain = self._chains.get(partition)
        if chain is None or outcome.partition != partition:
            return
        if not chain.take(outcome.previous, outcome.closing_offset):
            return
        self._number(outcome.group)
        self._end(outcome.group)
        if not outcome.kept:
            self.dropped += 1
            return
        self.kept += 1
        if not self.ledger.named(outcome.partition, outcome.closing_offset):
            self.backlog[(outcome.partition, outcome.closing_offset)] = None

    def saw_step(self, offset: int, record: object) -> None:
        """A record of `steps`."""
        if not self.ledger.take(offset, record):
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
            known.seen_s, known.seen_ms = worker.seen_s, worker.seen_ms
            known.capacity, known.inbox = worker.capacity, worker.inbox

    # What follows from it ------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Groups requested and not closed."""
        return len(self.groups)

    @property
    def ended(self) -> bool:
        """Whether every step of the run is planned."""
        return bool(self.limits.steps) and self.ledger.steps_planned >= self.limits.steps

    def admissible(self) -> int:
        """Groups that may be asked for now."""
        free = admission.free_groups(
            capacity=self.limits.capacity_groups,
            running=self.running,
            backlog=len(self.backlog),
            batch_groups=self.limits.batch_groups,
            max_staleness=self.limits.max_staleness,
        )
        remaining = admission.remaining_groups(
            steps=self.limits.steps,
            steps_planned=self.ledger.steps_planned,
            running=self.running,
            backlog=len(self.backlog),
            batch_groups=self.limits.batch_groups,
        )
        return free if remaining is None else min(free, remaining)

    def next_min_version(self) -> int:
        """Oldest weights for the next group asked for: those of the first step that is not full yet.

        With groups in order this is `admission.target_step`. A group that takes the place of a dropped one is wanted
        by an earlier step than those behind it; asked for as the last of all, it might wait for weights that its own
        step makes.
        """
        limits, planned = self.limits, self.ledger.steps_planned
        for step in range(planned, planned + limits.max_staleness + 1):
            oldest = admission.min_version(step, limits.max_staleness)
            ahead = len(self.backlog) + sum(group.min_version <= oldest for group in self.groups.values())
            if ahead < (step - planned + 1) * limits.batch_groups:
                return oldest
        return admission.min_version(planned + limits.max_staleness, limits.max_staleness)

    def drop_silent(self, now_s: float) -> list[Worker]:
        """Forget workers whose heartbeats stopped; returns them."""
        silent = [w for w in self.workers.values() if now_s - w.seen_s > self.limits.heartbeat_timeout_s]
        for worker in silent:
            del self.workers[worker.session]
        return silent

    def choose_worker(self, members: int, *, avoid: str = "") -> Worker | None:
        """The live worker with most free places for so many members; None while all are full or away.

        `avoid`: a session that is taken only where there is no other.
        """
        fit = [w for w in self.workers.values() if w.outstanding + members <= max(w.capacity * 2, members)]
        return min(fit, key=lambda w: (w.session == avoid, w.outstanding / max(w.capacity, 1), w.name), default=None)

    def unasked(self) -> Iterable[tuple[Group, list[int]]]:
        """Groups with members that were never asked for."""
        return [(group, group.missing) for group in self.groups.values() if group.missing and not group.closing]

    def overdue(self, now_s: float) -> list[tuple[Group, int]]:
        """Members to ask for once more: their worker is gone, or they take too long."""
        found = []
        for group in self.groups.values():
            if group.closing:
                continue
            for index, asked in group.asked.items():
                lost = asked.session not in self.workers or now_s - asked.asked_s > self.limits.reissue_after_s
                if not asked.arrived and asked.attempt == 0 and lost:
                    found.append((group, index))
        return found

    def expired(self, now_s: float) -> list[Group]:
        """Groups to close: a lifetime has passed since their youngest member was first asked for."""
        return [
            group
            for group in self.groups.values()
            if not group.closing
            and not group.missing
            and now_s - max(asked.first_s for asked in group.asked.values()) > group.lifetime_ms / 1000
        ]

    def open_groups(self) -> list[Group]:
        """Groups with a member on the log and without a close record."""
        return [group for group in self.groups.values() if group.opened and not group.closing]

    def open_strays(self) -> list[tuple[str, Stray]]:
        """Groups with members on the log that nobody validly asked for, and without a close record."""
        return [(name, s) for name, s in self.strays.items() if not s.closing and name not in self.groups]

    def awaited(self) -> list[Group]:
        """Groups that a live worker may still bring a member of, and that no close record stops."""
        return [
            group
            for group in self.groups.values()
            if not group.closing and any(not a.arrived and a.session in self.workers for a in group.asked.values())
        ]

    def _number(self, name: str) -> None:
        number = group_number(name)
        if number is not None:
            self.next_number = max(self.next_number, number + 1)

    def _end(self, name: str) -> None:
        group = self.groups.pop(name, None)
        self.strays.pop(name, None)
        self._closed.add(name)
        for asked in group.asked.values() if group else ():
            if not asked.arrived:
                self._release(asked)

    def _release(self, asked: Asked) -> None:
        if worker := self.workers.get(asked.session):
            worker.outstanding = max(0, worker.outstanding - 1)
