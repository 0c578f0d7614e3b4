"""Bench `path`: rollout -> topic -> filter and advantage -> topic -> trainer's arrays, all on one real broker.

Sides: product code from end to end (check and codec, outbox, the processor's partitions with the recipe zero-spread and
grpo, the trainer's backlog); the same loop written by hand on the bare client (`bench.hand_written`); and the limit, the
same bytes moved by the bare client and never looked at. One call = a batch of groups of 8, whose members arrive mixed.
Check `hand-written`: CPU time of the hand-written loop over ours, with 512 tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from bench.broker import PATIENCE_S, Broker, broker
from bench.codec import make_columns, make_record
from bench.hand_written import HandWritten, plain
from bench.harness import Bench, Side, ratio
from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra.kafka_log import KafkaLog
from infra.log import Place
from infra.ownership import read_record
from producers.outbox import Outbox
from schemas.codec import encode
from schemas.names import topic
from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from schemas.records import KEPT, Outcome, Trajectory
from schemas.validate import check_trajectory
from trainers.backlog import Backlog, from_start

GROUP_SIZE = 8
PARTITIONS = 2
COMMIT_EVERY_S = 1.0
MAX_TOKENS = 1_000_000
LIFETIME_MS = 600_000
TARGET = 0.7
BATCHES = {512: 128, 4096: 16}
"""Tokens of a trajectory -> groups in a batch."""
EQUAL_EVERY = 4
"""Every so many groups, all rewards are equal."""


def run(bench: Bench) -> None:
    """Measure on a broker of its own."""
    bench.rounds, bench.round_s = 7, 0.001  # one batch is a round
    with broker() as found:
        compare(bench, found, BATCHES)


def compare(bench: Bench, found: Broker, batches: dict[int, int]) -> None:
    """Take batches through both loops in turns; hold the ratio of the first size against the target."""
    ratios: dict[int, float] = {}
    log = found.log()
    try:
        for num_tokens, num_groups in batches.items():
            pair = Pair(found, log, num_tokens, num_groups, bench.rounds + 1)
            count = num_groups * GROUP_SIZE
            times = bench.measure(f"{count} trajectories of {num_tokens} tokens", pair.sides())
            pair.finish()
            ratios[num_tokens] = ratio(times["hand-written"], times["ours"])
            ours, theirs, limit = (times[name].median_us() / count for name in ("ours", "hand-written", "bytes alone"))
            bench.note(f"  CPU per trajectory: {ours:.0f} us, by hand {theirs:.0f} us: {ratios[num_tokens]:.2f}")
            bench.hold_against(f"the same bytes moved by the bare client, {num_tokens} tokens", limit, "us")
    finally:
        log.close()
    bench.check("hand-written", ratios[min(batches)], TARGET)


def make_batch(run: str, num_tokens: int, num_groups: int, first: int) -> list[Trajectory]:
    """Groups from number `first` on, members of all groups mixed; every EQUAL_EVERY-th group has equal rewards."""
    columns = make_columns(num_tokens)
    now_ms = time.time_ns() // 1_000_000
    return [
        replace(
            make_record(columns, number),
            run=run,
            index=index,
            partition=number % PARTITIONS,
            reward=0.5 if number % EQUAL_EVERY == 0 else (index * 7 + number) % 5 / 4,
            first_request_time_ms=now_ms,
            lifetime_ms=LIFETIME_MS,
        )
        for index in range(GROUP_SIZE)
        for number in range(first, first + num_groups)
    ]


class Product:
    """Ours from end to end, in one process."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        route = Route(run=run, policy="main", source_run=run, source_policy="main")
        recipe = make_recipe(group_filters=["zero-spread"], advantage="grpo", group_size=GROUP_SIZE)
        self._run, self._topic, self._log = run, topic(run, "main", "trajectories"), log
        self._outbox = Outbox(log)
        self._partitions = Partitions(
            log, route, recipe, patience_s=PATIENCE_S, commit_every_s=COMMIT_EVERY_S, max_tokens=MAX_TOKENS
        )
        self._reader = log.reader({Place(topic(run, "main", "samples"), p): 0 for p in range(PARTITIONS)})
        self._backlog = Backlog(run, "main", from_start(dict.fromkeys(range(PARTITIONS), 0)))

    def roll_out(self, records: list[Trajectory]) -> None:
        """As a worker: check, encode, hand to the outbox, until all is acknowledged."""
        for record in records:
            check_trajectory(record, run=self._run, policy="main", partition=record.partition, max_tokens=MAX_TOKENS)
            self._outbox.put(self._topic, record.partition, encode(record), record.group.encode())
        assert self._outbox.drain(PATIENCE_S)

    def process(self, count: int) -> None:
        """As a processor, until this many records are handled."""
        while count > 0:
            count -= self._partitions.work(0.25)

    def train(self, count: int) -> tuple[int, float]:
        """As a trainer, down to the arrays of kept members; members kept, and the sum of |advantage|."""
        kept, total = 0, 0.0
        while count > 0:
            envelopes = self._reader.poll(0.25)
            for envelope in envelopes:
                outcome = read_record(envelope)
                assert isinstance(outcome, Outcome)
                self._backlog.take(envelope.partition, envelope.offset, envelope.time_ms, outcome)
            count -= len(envelopes)
            waiting = self._backlog.waiting()
            for one in waiting:
                found = self._backlog.get(one.address)
                assert found is not None
                for member in found.members:
                    if member.disposition == KEPT:
                        unpack_bits(member.loss_mask, len(unpack_ints(member.tokens)))
                        unpack_floats(member.logprobs)
                        kept += 1
                        total += abs(member.advantage)
            self._backlog.done((one.address.partition, one.address.closing_offset) for one in waiting)
        return kept, total

    def close(self) -> None:
        """Let go."""
        self._outbox.close()
        self._partitions.discard()
        self._reader.close()


class Pair:
    """Both loops on topics of their own, and what they must agree on; batches are made before anything is measured."""

    def __init__(self, found: Broker, log: KafkaLog, num_tokens: int, num_groups: int, calls: int) -> None:
        runs = {side: f"path-{num_tokens}-{side}" for side in ("ours", "hand", "bytes")}
        kinds = ("trajectories", "samples", "dead-letters")
        topics = {topic(run, "main", kind): PARTITIONS for run in runs.values() for kind in kinds}
        found.create(topics, **{"message.timestamp.type": "LogAppendTime"})
        hand = (topic(runs["hand"], "main", "trajectories"), topic(runs["hand"], "main", "samples"))
        self._groups = num_groups
        self._ours = Product(log, runs["ours"])
        self._hand = HandWritten(found, hand, PARTITIONS, COMMIT_EVERY_S)
        self._mine = [make_batch(runs["ours"], num_tokens, num_groups, n * num_groups) for n in range(calls)]
        self._theirs = [
            [plain(record) for record in make_batch(runs["hand"], num_tokens, num_groups, n * num_groups)]
            for n in range(calls)
        ]
        self._bytes = Bytes(found, topic(runs["bytes"], "main", "trajectories"), self._mine[0])
        self._results: dict[str, list[tuple[int, float]]] = {"ours": [], "hand": []}

    def sides(self) -> list[Side]:
        """Each takes its next batch."""
        return [
            Side("ours", lambda: self._through("ours", self._ours, self._batches["ours"])),
            Side("hand-written", lambda: self._through("hand", self._hand, self._batches["hand"])),
            Side("bytes alone", self._bytes.move),
        ]

    @property
    def _batches(self) -> dict[str, list[Any]]:
        return {"ours": self._mine, "hand": self._theirs}

    def _through(self, name: str, loop: Product | HandWritten, batches: list[Any]) -> None:
        records = batches[len(self._results[name])]
        loop.roll_out(records)
        loop.process(len(records))
        self._results[name].append(loop.train(self._groups))

    def finish(self) -> None:
        """Let go of both; they must have come to the same members and advantages."""
        self._ours.close()
        self._hand.close()
        self._bytes.close()
        for ours, hand in zip(self._results["ours"], self._results["hand"], strict=True):
            assert ours[0] == hand[0] > 0 and math.isclose(ours[1], hand[1], rel_tol=1e-9), (ours, hand)


class Bytes:
    """The limit: the batch's bytes to a topic, back, as one record per group to the topic again, and back."""

    def __init__(self, found: Broker, name: str, records: list[Trajectory]) -> None:
        self._topic, self._producer, self._consumer = name, found.bare(KafkaProducer), found.bare(KafkaConsumer)
        places = [TopicPartition(name, partition) for partition in range(PARTITIONS)]
        self._consumer.assign(places)
        for place in places:
            self._consumer.seek(place, 0)
        self._small = [encode(record) for record in records]
        kept = self._small[: len(records) // GROUP_SIZE]
        self._large = [value * GROUP_SIZE if n % EQUAL_EVERY else value for n, value in enumerate(kept)]

    def move(self) -> None:
        """There and back, twice."""
        for values in (self._small, self._large):
            futures = [
                self._producer.send(self._topic, value, partition=n % PARTITIONS) for n, value in enumerate(values)
            ]
            for future in futures:
                future.get(PATIENCE_S)
            count = len(values)
            while count > 0:
                found = self._consumer.poll(timeout_ms=250, max_records=1000)
                count -= sum(map(len, found.values()))

    def close(self) -> None:
        """Let go."""
        self._producer.close()
        self._consumer.close(autocommit=False)
