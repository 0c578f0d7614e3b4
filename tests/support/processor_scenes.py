"""Partitions of trajectories with everything that may stand there, and a log that dies at the worst moment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra.log import Bounds, Committed, Envelope, Log, Pending, Place, TopicSpec
from infra.memory_log import MemoryLog
from schemas.codec import decode, encode
from schemas.records import DeadLetter, Outcome, Status
from schemas.rules.chain import Chain
from support.samples import close, request, trajectory

LIFETIME_MS = 40
GROUP_SIZE = 3
SOURCE, SAMPLES, DEAD_LETTERS = "demo.main.trajectories", "demo.main.samples", "demo.main.dead-letters"
ROUTE = Route(run="demo", policy="main", source_run="demo", source_policy="main")
POISON: Mapping[str, bytes | None] = {
    "not-ours": b"\x00\xff",
    "empty": None,
    "unknown-schema": b"\xc3\x01" + bytes(8) + b"x",
    "undecodable": encode(close(partition=0))[:-3],
    "wrong-kind": encode(request(partition=0)),
    "wrong-place": encode(trajectory(partition=7)),
    "invalid": encode(trajectory(partition=0, index=8)),
    "unknown-status": encode(trajectory(partition=0, status=Status.UNKNOWN, reward=None)),
}
"""A record for each reason of a dead letter."""


@dataclass(frozen=True)
class Event:
    """A record and when it is appended."""

    time_ms: int
    partition: int
    value: bytes | None


def scene(rng: random.Random, groups: int = 40, partitions: int = 1) -> list[Event]:
    """Interleaved groups with lost members, failed ones, second attempts, close records, late arrivals and poison."""
    events: list[Event] = []
    for n in range(groups):
        issued, partition = 1000 + n * 4, n % partitions
        base = trajectory(
            group=f"g{n:08d}", group_size=GROUP_SIZE, partition=partition, item=n,
            first_request_time_ms=issued, lifetime_ms=LIFETIME_MS,
        )  # fmt: skip
        for index in range(GROUP_SIZE):
            failed = rng.random() < 0.1
            changes = {"status": Status.TIMEOUT, "reward": None} if failed else {"reward": round(rng.random(), 2)}
            is_lost = rng.random() < 0.15
            if not is_lost:
                value = encode(replace(base, index=index, **changes))
                events.append(Event(issued + int(rng.expovariate(1 / 12)), partition, value))
            if is_lost or rng.random() < 0.2:  # a second attempt, perhaps far too late
                value = encode(replace(base, index=index, attempt=1))
                events.append(Event(issued + 15 + int(rng.expovariate(1 / 25)), partition, value))
        closing = encode(close(group=base.group, partition=partition))
        events.append(Event(issued + 30 + int(rng.expovariate(1 / 20)), partition, closing))
        if rng.random() < 0.1:
            poison = rng.choice([value for name, value in POISON.items() if name != "corrupt-batch"])
            events.append(Event(issued + rng.randint(0, 20), partition, poison))
    return sorted(events, key=lambda event: event.time_ms)


class Clock:
    """Append times."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


def filled(events: list[Event], partitions: int = 1) -> MemoryLog:
    """A log on which these records stand."""
    clock = Clock()
    log = MemoryLog(clock_ms=clock)
    log.create([TopicSpec(SOURCE, partitions), TopicSpec(SAMPLES, partitions), TopicSpec(DEAD_LETTERS, 1)])
    append(log, events)
    return log


def append(log: MemoryLog, events: list[Event]) -> None:
    """More records, each at its time."""
    assert isinstance(log.clock_ms, Clock)
    writer = log.writer()
    for event in events:
        log.clock_ms.now_ms = max(log.clock_ms.now_ms, event.time_ms)
        writer.send(SOURCE, event.partition, event.value)
    writer.flush(5.0)
    writer.close()


def processor(
    log: object, *, commit_every_s: float = 0.0, min_members: int = 2, advantage: str = "dr-grpo"
) -> Partitions:
    """A processor's partitions over a log; commits at every turn unless told otherwise."""
    recipe = make_recipe(
        advantage=advantage, group_filters=["zero-spread"], min_members=min_members, group_size=GROUP_SIZE
    )
    return Partitions(
        cast("Log", log),
        ROUTE, recipe, patience_s=5.0, commit_every_s=commit_every_s, max_tokens=4_000_000
    )  # fmt: skip


def work_off(partitions: Partitions, log: MemoryLog) -> None:
    """Work until everything that stands on the log is handled."""
    for _ in range(10_000):
        partitions.work(0.0)
        if all(partitions.positions[p] >= bounds.end for p, bounds in log.bounds(SOURCE).items()):
            return
    raise AssertionError("the end of the log was never reached")


def records(log: MemoryLog, topic: str) -> list[Envelope]:
    """Everything on a topic."""
    reader = log.reader({Place(topic, p): bounds.start for p, bounds in log.bounds(topic).items()})
    found: list[Envelope] = []
    while batch := reader.poll(0.0):
        found += batch
    return found


def effective(log: MemoryLog) -> list[Outcome]:
    """The outcomes that count, by partition, as any reader takes them."""
    taken: list[Outcome] = []
    chains: dict[int, Chain] = {}
    for envelope in sorted(records(log, SAMPLES), key=lambda e: (e.partition, e.offset)):
        outcome = decode(envelope.value)
        assert isinstance(outcome, Outcome)
        if chains.setdefault(envelope.partition, Chain()).take(outcome.previous, outcome.closing_offset):
            taken.append(outcome)
    return taken


def buried(log: MemoryLog) -> list[DeadLetter]:
    """The dead letters, in their order."""
    letters = [decode(envelope.value) for envelope in records(log, DEAD_LETTERS)]
    assert all(isinstance(letter, DeadLetter) for letter in letters)
    return letters  # type: ignore[return-value]


class Crash(BaseException):
    """The process is gone."""


class DeadlyLog:
    """A log of which each call may be the last of its process; polls give few records at a time."""

    def __init__(self, log: MemoryLog, rng: random.Random, deadliness: float) -> None:
        self.log, self.rng, self.deadliness = log, rng, deadliness

    def perhaps_die(self) -> None:
        """Crash now and then."""
        if self.rng.random() < self.deadliness:
            raise Crash

    def reader(self, positions: Mapping[Place, int]) -> _Reader:
        return _Reader(self, positions)

    def writer(self) -> _Writer:
        return _Writer(self)

    def topics(self) -> set[str]:
        return self.log.topics()

    def bounds(self, topic: str) -> dict[int, Bounds]:
        return self.log.bounds(topic)

    def committed(self, group: str, places: list[Place]) -> dict[Place, Committed]:
        return self.log.committed(group, places)

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        self.perhaps_die()
        self.log.commit(group, positions)
        self.perhaps_die()


class _Reader:
    def __init__(self, owner: DeadlyLog, positions: Mapping[Place, int]) -> None:
        self._owner, self._reader = owner, owner.log.reader(positions)

    def poll(self, timeout_s: float) -> list[Envelope]:
        self._owner.perhaps_die()
        return self._reader.poll(timeout_s, max_records=self._owner.rng.randint(1, 8))

    def position(self, place: Place) -> int:
        return self._reader.position(place)

    def end(self, place: Place) -> int:
        return self._reader.end(place)

    def close(self) -> None:
        self._reader.close()


class _Writer:
    def __init__(self, owner: DeadlyLog) -> None:
        self._owner, self._writer = owner, owner.log.writer()

    def send(self, topic: str, partition: int, value: bytes, key: bytes | None = None) -> Pending:
        self._owner.perhaps_die()
        pending = self._writer.send(topic, partition, value, key=key)
        self._owner.perhaps_die()
        return pending

    def close(self) -> None:
        self._writer.close()
