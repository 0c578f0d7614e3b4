"""Processors crash, freeze and come back as zombies; the effects equal those of an undisturbed run.

The real rules (PartitionState, Chain) over a simulated log. `bug` plants a fault, to show that the check can fail.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from schemas.records import Outcome
from schemas.rules.chain import Chain, ReadBack
from schemas.rules.partition import Due, PartitionState

SIZE, LIFETIME_MS = 3, 40_000


class Entry(NamedTuple):
    kind: str
    group: int
    member: int
    issued_ms: int
    time_ms: int


def make_log(rng: random.Random) -> list[Entry]:
    """Members of 60 groups interleaved, with lost members, second attempts, close records and late arrivals."""
    entries = []
    for group in range(60):
        issued = group * 4000
        lost = {index for index in range(SIZE) if rng.random() < 0.15}
        for index in range(SIZE):
            if index not in lost:
                entries.append(Entry("m", group, index, issued, issued + int(rng.expovariate(1 / 12) * 1000)))
            if index in lost or rng.random() < 0.2:
                entries.append(Entry("m", group, index, issued, issued + 15000 + int(rng.expovariate(1 / 25) * 1000)))
        entries.append(Entry("c", group, -1, issued, issued + 30000 + int(rng.expovariate(1 / 20) * 1000)))
    return sorted(entries, key=lambda entry: entry.time_ms)


def outcome(due: Due[int]) -> Outcome:
    closed = due.closed
    from support.outcomes import make_outcome

    return make_outcome(
        group=closed.group,
        members=[(index, offset) for index, offset, _ in closed.members],
        closing_offset=closed.closing_offset,
        previous=due.previous,
        closing_time_ms=closed.closing_time_ms,
        lifetime_ms=closed.lifetime_ms,
        closed_by=closed.closed_by,
    )


@dataclass
class Stored:
    position: int = 0
    note: str = ""


@dataclass
class Processor:
    """The real state, a simulated broker: `samples` is the outcome partition, `stored` the committed position."""

    log: list[Entry]
    samples: list[Outcome]
    stored: Stored
    bug: str = ""
    state: PartitionState[int] = field(init=False)

    def __post_init__(self) -> None:
        self.assign()

    def assign(self) -> None:
        start = self.stored.position
        time_ms = self.log[min(start, len(self.log) - 1)].time_ms
        self.state = PartitionState(start, ReadBack.from_note(self.stored.note), time_ms)
        if self.bug != "no-read-back":
            first = self.state.read_from or 0
            for offset, record in enumerate(self.samples[first:], first):
                self.state.read_back(offset, record)

    @property
    def at_end(self) -> bool:
        return self.state.position >= len(self.log)

    def step(self) -> Due[int] | None:
        offset = self.state.position
        entry = self.log[offset]
        if entry.kind == "c":
            due = self.state.close(f"g{entry.group}", offset=offset, time_ms=entry.time_ms)
            if due is None and self.bug == "ghost-close" and offset > self.state.last:
                self._ghost(entry, offset)
            return due
        lifetime = 10**9 if self.bug == "no-lifetime" else LIFETIME_MS
        _, due = self.state.add(
            f"g{entry.group}",
            size=SIZE,
            index=entry.member,
            offset=offset,
            time_ms=entry.time_ms,
            first_request_time_ms=entry.issued_ms,
            lifetime_ms=lifetime,
            payload=offset,
        )
        return due

    def _ghost(self, entry: Entry, offset: int) -> None:
        last = max((o.closing_offset for o in self.samples), default=-1)
        from support.outcomes import make_outcome

        self.samples.append(
            make_outcome(
                group=f"g{entry.group}", members=[], closing_offset=offset, previous=last, closing_time_ms=entry.time_ms
            )
        )

    def write(self, due: Due[int]) -> None:
        self.samples.append(outcome(due))
        self.state.acknowledged(due, len(self.samples) - 1)

    def commit(self) -> None:
        if self.bug == "commit-all":
            self.stored.position = max(self.stored.position, self.state.position)
        elif found := self.state.committable():
            self.stored.position, self.stored.note = found[0], found[1].to_note()


def effective(samples: list[Outcome], bug: str = "") -> list[Outcome]:
    chain = Chain()
    return [o for o in samples if chain.take(o.previous, o.closing_offset) or bug == "no-chain"]


def facts(samples: list[Outcome], bug: str = "") -> list[tuple[str, list[tuple[int, int]], int]]:
    taken = effective(samples, bug)
    return [(o.group, [(m.index, m.offset) for m in o.members], o.closing_offset) for o in taken]


def undisturbed(log: list[Entry]) -> list[Outcome]:
    alone = Processor(log, [], Stored())
    while not alone.at_end:
        if due := alone.step():
            alone.write(due)
    return alone.samples


def disturbed(log: list[Entry], rng: random.Random, bug: str) -> list[Outcome]:
    samples: list[Outcome] = []
    stored = Stored()
    live, zombies = Processor(log, samples, stored, bug), []
    for _ in range(20_000):
        if live.at_end:
            return samples
        for _ in range(rng.randint(1, 12)):
            if not live.at_end and (due := live.step()):
                live.write(due)
        if rng.random() < 0.7:
            live.commit()
        if rng.random() < 0.12:  # dies before a commit, or freezes while a successor takes over
            if rng.random() < 0.5:
                zombies.append(live)
            live = Processor(log, samples, stored, bug)
        if zombies and rng.random() < 0.4:
            zombie = rng.choice(zombies)
            for _ in range(rng.randint(1, 20)):
                if not zombie.at_end and (due := zombie.step()):
                    zombie.write(due)
            if rng.random() < 0.3:
                zombie.commit()  # an older or a newer position than the owner's: both are sound
            if rng.random() < 0.5:
                zombies.remove(zombie)
    raise AssertionError("never got through")


def run(seed: int, bug: str = "") -> bool:
    rng = random.Random(seed)
    log = make_log(rng)
    try:
        return facts(disturbed(log, rng, bug), bug) == facts(undisturbed(log))
    except AssertionError:
        if bug:
            return False
        raise


@pytest.mark.parametrize("seed", range(150))
def test_effects_equal_those_of_an_undisturbed_run(seed: int) -> None:
    assert run(seed), f"seed {seed}"


@pytest.mark.parametrize("bug", ["no-read-back", "no-chain", "commit-all", "ghost-close", "no-lifetime"])
def test_each_planted_bug_is_found(bug: str) -> None:
    assert not all(run(seed, bug) for seed in range(60)), f"{bug} was not noticed in 60 runs"


def test_repeats_really_happen() -> None:
    """Without repeats on the log, the test above would prove nothing."""
    rng = random.Random(3)
    samples = disturbed(make_log(rng), rng, "")
    assert len(samples) > len(effective(samples))


@pytest.mark.prove
def test_many_seeds() -> None:
    failing = [seed for seed in range(1000, 6000) if not run(seed)]
    assert not failing, failing[:5]
