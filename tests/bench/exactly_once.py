"""Bench `exactly-once`: one processor at a time, killed with SIGKILL at random moments, on both sides at the same ones.

Both read the same trajectories and do the same work on them (codec, checks, recipe, outcome). Ours: `Partitions` on our
log, repeats without effect by the chain. The other: a loop on the bare client that delivers at least once: outputs are
acknowledged before offsets are committed, offsets never pass an open group, repeats stand on its topic. Counted are
effects: groups that got an outcome, each once, per second of a processor's life, starting up included (Python's own
start is not: processes are forked ready). Checks: `at-least-once`, the ratio; `lost` and `doubled`, ours, exactly 0.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata

from bench.broker import PATIENCE_S, Broker, broker
from bench.harness import Bench
from bench.path import GROUP_SIZE, MAX_TOKENS, PARTITIONS, make_batch
from consumers.components import Recipe, make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route, judge, make_outcome
from infra.log import Place
from infra.ownership import read_record
from schemas.codec import decode, encode
from schemas.names import topic
from schemas.records import Outcome, Trajectory
from schemas.rules.chain import Chain
from schemas.rules.closing import ClosedGroup
from schemas.validate import check_outcome, check_trajectory

COMMIT_EVERY_S = 0.2
TARGET = 0.85
SOURCE = "kills"
SEED = 20
NUM_GROUPS = 800
NUM_TOKENS = 512
NUM_KILLS = 2
LIFE_S = (0.4, 1.2)
"""Shortest and longest life of a processor before it is killed."""
MIXED = 32
"""Groups that are open at the same time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's way through all the work, over several lives."""

    life_s: float
    cpu_s: float
    kills: int
    effects: int
    lost: int
    doubled: int
    """Effects beyond one of a group."""
    repeats: int
    """Outcomes on the topic that are not its first."""


def run(bench: Bench) -> None:
    """Measure on a broker of its own."""
    with broker() as found:
        compare(bench, found, num_groups=NUM_GROUPS, rounds=5, life_s=LIFE_S)


def compare(bench: Bench, found: Broker, *, num_groups: int, rounds: int, life_s: tuple[float, float]) -> None:
    """Both sides in turns, the same kills for both in a round; another one first in each round."""
    groups = fill(found, num_groups)
    sides: dict[str, tuple[Callable[..., None], list[Turn]]] = {
        "ours": (ours, []),
        "at-least-once": (at_least_once, []),
    }
    for turn in range(rounds):
        kills = kill_times(turn, NUM_KILLS, life_s)
        for name in sorted(sides, reverse=bool(turn % 2)):
            work, turns = sides[name]
            turns.append(one_turn(found, work, f"{name}-{turn}", kills, groups, chained=name == "ours"))
    mine, theirs = sides["ours"][1], sides["at-least-once"][1]
    for name, (_, turns) in sides.items():
        bench.note(
            f"{name:<16} {statistics.median(t.effects / t.life_s for t in turns):7.0f} effects/s  "
            f"{1e6 * statistics.median(t.cpu_s / t.effects for t in turns) / GROUP_SIZE:6.0f} us CPU per trajectory  "
            f"{sum(t.kills for t in turns)} kills  {sum(t.repeats for t in turns)} repeats on the topic  "
            f"lost {sum(t.lost for t in turns)}  doubled {sum(t.doubled for t in turns)}"
        )
    pairs = list(zip(mine, theirs, strict=True))
    cpu = statistics.median((b.cpu_s / b.effects) / (a.cpu_s / a.effects) for a, b in pairs)
    bench.note(f"CPU time per effect, at-least-once / ours: {cpu:.2f}")
    rate = statistics.median((a.effects / a.life_s) / (b.effects / b.life_s) for a, b in pairs)
    bench.check("at-least-once", rate, TARGET)
    bench.check("lost", sum(turn.lost for turn in mine), 0, "lower")
    bench.check("doubled", sum(turn.doubled for turn in mine), 0, "lower")


def kill_times(turn: int, count: int, life_s: tuple[float, float]) -> list[float]:
    """Seconds that each processor of a turn lives before it is killed.

    >>> kill_times(1, 2, (0.5, 1.5)) == kill_times(1, 2, (0.5, 1.5)) != kill_times(2, 2, (0.5, 1.5))
    True
    """
    rng = random.Random(SEED * 1000 + turn)
    return [rng.uniform(*life_s) for _ in range(count)]


def fill(found: Broker, num_groups: int) -> set[str]:
    """Trajectories on the topic that both sides read; the names of their groups."""
    source = topic(SOURCE, "main", "trajectories")
    found.create({source: PARTITIONS}, **{"message.timestamp.type": "LogAppendTime"})
    log = found.log()
    writer = log.writer()
    groups = set()
    for first in range(0, num_groups, MIXED):
        for record in make_batch(SOURCE, NUM_TOKENS, min(MIXED, num_groups - first), first):
            writer.send(source, record.partition, encode(record))
            groups.add(record.group)
    writer.flush(PATIENCE_S)
    log.close()
    return groups


def one_turn(
    found: Broker, work: Callable[..., None], run: str, kills: list[float], groups: set[str], *, chained: bool
) -> Turn:
    """One life after the other until all the work is done; the last one is not killed."""
    samples = topic(run, "main", "samples")
    found.create({samples: PARTITIONS, topic(run, "main", "dead-letters"): 1})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    life_s = cpu_s = 0.0
    killed = 0
    for limit_s in [*kills, PATIENCE_S]:
        spent = context.Value("d", 0.0)
        start_s = time.perf_counter()
        process = context.Process(target=work, args=(found, run, spent), daemon=True)
        process.start()
        process.join(limit_s)
        is_killed = process.is_alive()
        if is_killed:
            process.kill()
            process.join()
        life_s += time.perf_counter() - start_s
        cpu_s += spent.value
        killed += is_killed
        if not is_killed:
            assert process.exitcode == 0, f"{run}: a processor ended with {process.exitcode}"
            counts = Counter(outcome.group for outcome in _outcomes(found, samples, chained=chained))
            repeats = sum(1 for _ in _outcomes(found, samples, chained=False)) - len(counts)
            effects = len(counts)
            doubled = counts.total() - effects if chained else 0
            return Turn(life_s, cpu_s, killed, effects, len(groups - counts.keys()), doubled, repeats)
    raise AssertionError(f"{run}: the work was not done within {PATIENCE_S:g} s after the last kill")


def _outcomes(found: Broker, samples: str, *, chained: bool) -> Iterator[Outcome]:
    """What a reader takes: everything, or what continues the chain."""
    log = found.log()
    bounds = log.bounds(samples)
    reader = log.reader({Place(samples, partition): at.start for partition, at in bounds.items()})
    chains = {partition: Chain() for partition in bounds}
    while any(reader.position(Place(samples, partition)) < at.end for partition, at in bounds.items()):
        for envelope in reader.poll(1.0):
            outcome = read_record(envelope)
            assert isinstance(outcome, Outcome)
            assert len(outcome.members) == GROUP_SIZE
            if not chained or chains[envelope.partition].take(outcome.previous, outcome.closing_offset):
                yield outcome
    log.close()


def ours(found: Broker, run: str, spent: Any) -> None:
    """A processor of ours, until everything that stands on the log is handled."""
    log = found.log()
    route = Route(run=run, policy="main", source_run=SOURCE, source_policy="main")
    partitions = Partitions(
        log, route, _recipe(), patience_s=PATIENCE_S, commit_every_s=COMMIT_EVERY_S, max_tokens=MAX_TOKENS
    )
    ends = log.bounds(topic(SOURCE, "main", "trajectories"))
    while not partitions.positions or any(partitions.positions[p] < at.end for p, at in ends.items()):
        partitions.work(0.25)
        spent.value = time.process_time()
    partitions.commit()
    spent.value = time.process_time()


def at_least_once(found: Broker, run: str, spent: Any) -> None:
    """A processor on the bare client, until everything that stands on the log is handled."""
    loop = AtLeastOnce(found, run)
    while not loop.done():
        loop.work()
        spent.value = time.process_time()
    loop.commit()
    spent.value = time.process_time()


def _recipe() -> Recipe:
    return make_recipe(group_filters=["zero-spread"], advantage="grpo", group_size=GROUP_SIZE)


class AtLeastOnce:
    """Outputs acknowledged, then offsets committed, never beyond an open group: nothing lost, repeats after a crash."""

    def __init__(self, found: Broker, run: str) -> None:
        self._samples, self._recipe = topic(run, "main", "samples"), _recipe()
        self._route = Route(run=run, policy="main", source_run=SOURCE, source_policy="main")
        self._places = [TopicPartition(topic(SOURCE, "main", "trajectories"), p) for p in range(PARTITIONS)]
        self._producer = found.bare(KafkaProducer)
        self._consumer = found.bare(KafkaConsumer, group_id=f"{run}.by-hand")
        self._consumer.assign(self._places)
        for place in self._places:
            committed = self._consumer.committed(place)
            self._consumer.seek(place, committed or 0)
        self._ends = self._consumer.end_offsets(self._places)
        self._positions = {place: self._consumer.position(place) for place in self._places}
        self._groups: dict[str, list[tuple[int, Trajectory]]] = {}
        self._next_commit_s = 0.0

    def done(self) -> bool:
        """Whether everything is handled."""
        return all(self._positions[place] >= self._ends[place] for place in self._places)

    def work(self) -> None:
        """Poll, handle, wait for acknowledgements, commit when it is time."""
        futures = []
        for place, records in self._consumer.poll(timeout_ms=250, max_records=1000).items():
            for record in records:
                outcome = self._add(place.partition, record)
                if outcome is not None:
                    key = outcome.group.encode()
                    futures.append(
                        self._producer.send(self._samples, encode(outcome), key=key, partition=place.partition)
                    )
            self._positions[place] = records[-1].offset + 1
        for future in futures:
            future.get(PATIENCE_S)
        if time.monotonic() >= self._next_commit_s:
            self._next_commit_s = time.monotonic() + COMMIT_EVERY_S
            self.commit()

    def commit(self) -> None:
        """Store where a successor must begin."""
        held = dict(self._positions)
        for members in self._groups.values():
            offset, first = members[0]
            place = self._places[first.partition]
            held[place] = min(offset, held[place])
        self._consumer.commit({place: OffsetAndMetadata(offset, "", -1) for place, offset in held.items()})

    def _add(self, partition: int, record: Any) -> Outcome | None:
        """The outcome of the group that this record completes."""
        trajectory = decode(record.value)
        assert isinstance(trajectory, Trajectory)
        check_trajectory(trajectory, run=SOURCE, policy="main", partition=partition, max_tokens=MAX_TOKENS)
        members = self._groups.setdefault(trajectory.group, [])
        members.append((record.offset, trajectory))
        if len(members) < trajectory.group_size:
            return None
        del self._groups[trajectory.group]
        members.sort(key=lambda pair: pair[1].index)
        trajectories = [one for _, one in members]
        closed = ClosedGroup(
            trajectory.group,
            trajectory.group_size,
            tuple((one.index, offset, one) for offset, one in members),
            record.offset,
            record.timestamp,
            trajectory.lifetime_ms,
            "complete",
        )
        judgement = judge(trajectories, closed.size, self._recipe)
        outcome = make_outcome(closed, trajectories, judgement, route=self._route, partition=partition, previous=-1)
        check_outcome(outcome, run=outcome.run, policy=outcome.policy, partition=partition, columns=False)
        return outcome
