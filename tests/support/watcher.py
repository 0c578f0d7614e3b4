"""Watches a log while a run goes on, as somebody who knows only the rules, and asserts at every record what must hold."""

from __future__ import annotations

from collections import Counter

from infra.log import Envelope, Place
from infra.memory_log import MemoryLog
from infra.ownership import read_record
from infra.settings import Settings
from infra.weights.announce import Heads, fold
from schemas.names import topic
from schemas.records import Address, Announcement, Claim, Close, Outcome, Plan, PlanDrop, Request, Trajectory
from schemas.rules.chain import Chain
from schemas.rules.claims import Claims
from schemas.rules.ledger import Ledger

KINDS = ("requests", "trajectories", "samples", "steps", "weights")


class Watcher:
    """Call `look` after every write."""

    def __init__(self, log: MemoryLog, settings: Settings) -> None:
        self.log, self.run = log, settings.run.name
        (self.policy,) = settings.policies
        table = settings.policies[self.policy]
        self.capacity, self.batch = table.dispatch.capacity_groups, table.train.batch_groups
        self.eta = table.train.max_staleness
        self._lifetime_ms = int(table.dispatch.lifetime_s * 1000)
        self.kinds = {topic(self.run, self.policy, kind): kind for kind in KINDS}
        self._reader = log.reader({Place(name, partition): 0 for name in self.kinds for partition in log.bounds(name)})
        self.claims: dict[Place, Claims] = {}
        self.ledger, self.heads = Ledger(), Heads(self.run, self.policy)
        self.running: dict[str, dict[int, int]] = {}
        """Group -> index -> time of its first request."""
        self.first: dict[tuple[str, int], int] = {}
        self.request_times: dict[tuple[str, int], set[int]] = {}
        self.attempts: Counter[tuple[str, int, int]] = Counter()
        self.joined: set[str] = set()
        self.ended: set[str] = set()
        self.backlog: set[tuple[int, int]] = set()
        self.chains: dict[int, Chain] = {}
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return (
            f"{self.ledger.steps_done} steps done, {self.ledger.steps_planned} planned, running {sorted(self.running)}, "
            f"backlog {len(self.backlog)}, head {self.heads.head}, {dict(self.counts)}"
        )

    def look(self) -> None:
        """Take in what was appended since."""
        if self.log.away:
            return
        while envelopes := self._reader.poll(0.0):
            for envelope in envelopes:
                record, kind = read_record(envelope), self.kinds[envelope.topic]
                self.counts[type(record).__name__] += 1
                if kind == "requests" and isinstance(record, Claim | Request):
                    self._inbox(envelope.place, record, envelope.time_ms)
                elif isinstance(record, Trajectory):
                    self._trajectory(record, envelope.time_ms)
                elif isinstance(record, Close):
                    self._close(record, envelope.time_ms)
                elif isinstance(record, Outcome):
                    self._outcome(envelope.partition, record)
                elif kind == "steps":
                    self._step(envelope, record)
                elif kind == "weights" and isinstance(record, Claim | Announcement):
                    self._weights(record)

    def executes(self, plan: Plan) -> None:
        """A trainer begins to execute this plan: it must count by now."""
        self.look()
        counting = [entry for _, entry in self.ledger.plans]
        assert plan in counting, f"plan of step {plan.step} by epoch {plan.epoch} is executed and does not count"

    def _inbox(self, place: Place, record: Claim | Request, time_ms: int) -> None:
        claims = self.claims.setdefault(place, Claims())
        if isinstance(record, Claim):
            claims.claim(record.epoch, record.nonce)
            return
        key = (record.group, record.index)
        self.request_times.setdefault(key, set()).add(record.first_request_time_ms or time_ms)
        if not claims.owns(record.epoch, record.nonce):
            self.counts["void requests"] += 1
            return
        self.attempts[(*key, record.attempt)] += 1
        assert self.attempts[(*key, record.attempt)] == 1, f"{record.id} was validly asked for twice"
        assert record.attempt <= 8 or record.resume, "asked a tenth time, and not to go on from further tokens"
        if record.attempt:
            self.counts["asked once more"] += 1
            assert record.first_request_time_ms == self.first[key], "a re-issue has a first time of its own"
        self.first.setdefault(key, time_ms)
        if record.group not in self.ended:
            self.running.setdefault(record.group, {})[record.index] = self.first[key]
        assert len(self.running) <= self.capacity, f"{len(self.running)} groups run, capacity is {self.capacity}"
        held, bound = len(self.running) + len(self.backlog), (self.eta + 1) * self.batch
        assert held <= bound, f"{held} groups run or wait, at most {bound} may"

    def _trajectory(self, record: Trajectory, time_ms: int) -> None:
        times = self.request_times[(record.group, record.index)]
        assert record.first_request_time_ms in times, "a first request time that no request has"
        if time_ms <= record.first_request_time_ms + record.lifetime_ms:
            self.joined.add(record.group)

    def _close(self, record: Close, time_ms: int) -> None:
        self.counts[f"close {record.reason}"] += 1
        times = self.running.get(record.group)
        if record.reason == "lifetime" and times:
            over = max(times.values()) + self._lifetime_ms
            if record.epoch == max(claims.epoch for claims in self.claims.values()):
                assert time_ms > over, f"{record.group} was closed {over - time_ms} ms early"
            if time_ms > over and record.group not in self.joined:
                self._end(record.group)

    def _outcome(self, partition: int, record: Outcome) -> None:
        if not self.chains.setdefault(partition, Chain()).take(record.previous, record.closing_offset):
            self.counts["repeated outcomes"] += 1
            return
        key = (partition, record.closing_offset)
        self.outcomes[key] = record
        self._end(record.group)
        if record.kept:
            self.backlog.add(key)

    def _step(self, envelope: Envelope, record: object) -> None:
        if not self.ledger.take(envelope.offset, record, envelope.time_ms):
            self.counts["void records of steps"] += 1
            return
        if not isinstance(record, Plan):
            return
        named: list[Address | PlanDrop] = [*record.samples, *record.drops]
        for entry in named:
            self.backlog.remove((entry.partition, entry.closing_offset))
        for address in record.samples:
            age = record.step - self.outcomes[(address.partition, address.closing_offset)].oldest_version
            assert 0 <= age <= self.eta, f"step {record.step} eats a group of age {age}, the bound is {self.eta}"

    def _weights(self, record: Claim | Announcement) -> None:
        before, self.heads = self.heads.head, fold(self.heads, record)
        if isinstance(record, Announcement) and (record.epoch, record.nonce) == (self.heads.epoch, self.heads.nonce):
            old = before.name.version if before else -1
            again = before is not None and before.name == (record.epoch, record.version)
            assert record.version > old or again, f"version {record.version} was announced after version {old}"
            assert record.version <= self.ledger.steps_done, "announced before its result"

    def _end(self, group: str) -> None:
        self.running.pop(group, None)
        self.ended.add(group)
