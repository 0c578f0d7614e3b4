"""Bench `groups`: what open groups cost in memory, and whether lost members make it grow.

A partition's state as a processor holds it (`PartitionState` over encoded bytes) is fed with groups of 8 whose members
arrive over half a lifetime of simulated time, as fast as possible: 100 and 1,000 groups a second, 0, 0.1 and 1 % of the
members lost, and a close record after a lifetime for each group that lost one. Memory is what Python has allocated
(tracemalloc), divided by the open members that it holds. Checks: `lists`, bytes of an open member held encoded over the
same decoded to Python lists; `memory slope`, how much the memory of the longest run (the worst case) grows once it is warm,
as a share of its mean; in the shorter ones chance alone moves it by some hundredths.
"""

from __future__ import annotations

import heapq
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.codec import ArrayRecords, make_columns, make_record
from bench.harness import Bench, Side, ratio
from schemas.codec import decode, encode
from schemas.rules.partition import PartitionState

GROUP_SIZE = 8
NUM_TOKENS = 512
NUM_GROUPS = {(100, 0.0): 6_000, (100, 0.001): 6_000, (100, 0.01): 6_000} | {
    (1000, 0.0): 12_000,
    (1000, 0.001): 12_000,
    (1000, 0.01): 50_000,
}
"""(groups a second, share of members lost) -> groups of that run; the worst case runs longest."""
LIFETIME_MS = 2_000
LISTS_TARGET, SLOPE_TARGET = 0.25, 0.05
WARM = 0.4
"""Share of a run after which memory must be flat."""
SAMPLES = 100
NUM_HELD = 64


@dataclass(frozen=True, slots=True)
class Flow:
    """What was seen of one run: allocated bytes and open members at evenly spaced moments, and groups that closed."""

    held_bytes: tuple[int, ...]
    open_members: tuple[int, ...]
    num_closed: int

    def slope(self) -> float:
        """Growth of memory after the warm-up, fitted by least squares, over the mean there."""
        return growth(self.held_bytes[int(WARM * len(self.held_bytes)) :])


def run(bench: Bench) -> None:
    """All rates and losses, then one member held in both forms, then the time that each form takes."""
    compare(bench, NUM_GROUPS)


def compare(bench: Bench, flows: dict[tuple[int, float], int]) -> None:
    """Feed the flows, hold members in both forms, check."""
    payload = encode(make_record(make_columns(NUM_TOKENS), 0))
    slopes = {}
    bench.note(f"groups of {GROUP_SIZE}, {len(payload):,} bytes each member, lifetime {LIFETIME_MS} ms")
    for (rate, lost), num_groups in flows.items():
        flow = feed(num_groups, rate, lost, payload)
        assert flow.num_closed == num_groups, (flow.num_closed, num_groups)
        slopes[rate, lost] = flow.slope()
        bench.note(
            f"  {num_groups:>6,} groups, {rate:>5} a second, {lost:5.1%} lost: at most {max(flow.open_members):>6,} "
            f"members open, {max(flow.held_bytes) / 1e6:5.1f} MB held, slope {flow.slope():+.3f}"
        )
    encoded, lists = held_encoded(payload), held_lists()
    bench.note(f"  a member held encoded {encoded:,.0f} bytes, as lists {lists:,.0f} bytes")
    times = bench.measure("a member read and held", sides(payload))
    bench.note(f"  lists / ours {ratio(times['avro arrays to lists'], times['ours']):.1f}")
    bench.check("memory slope", slopes[max(flows, key=flows.__getitem__)], SLOPE_TARGET, "lower")
    bench.check("lists", encoded / lists, LISTS_TARGET, "lower")
    bench.hold_against("bytes of a member on the wire", len(payload), "bytes")


def events(num_groups: int, rate: int, lost: float, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """(time, group, index) in order of time; index -1 is the group's close record.

    >>> [index for _, _, index in events(1, 1000, 0.0, random.Random(0))].count(-1)
    0
    """
    coming: list[tuple[int, int, int]] = []
    for group in range(num_groups):
        asked_ms = group * 1000 // rate
        while coming and coming[0][0] < asked_ms:
            yield heapq.heappop(coming)
        arrived = [index for index in range(GROUP_SIZE) if rng.random() >= lost]
        for index in arrived or [0]:
            heapq.heappush(coming, (asked_ms + rng.randrange(LIFETIME_MS // 2), group, index))
        if len(arrived) < GROUP_SIZE:
            heapq.heappush(coming, (asked_ms + LIFETIME_MS, group, -1))
    while coming:
        yield heapq.heappop(coming)


def feed(num_groups: int, rate: int, lost: float, payload: bytes) -> Flow:
    """A partition's state taken through one flow; every payload is an object of its own, as a reader gives them."""
    rng = random.Random(7)
    state: PartitionState[bytes] = PartitionState(0)
    every = num_groups * GROUP_SIZE // SAMPLES
    held: list[int] = []
    opened: list[int] = []
    closed = 0
    tracemalloc.start()
    try:
        for offset, (time_ms, group, index) in enumerate(events(num_groups, rate, lost, rng)):
            name = f"g{group:08d}"
            if index < 0:
                due = state.close(name, offset=offset, time_ms=time_ms)
            else:
                _, due = state.add(
                    name,
                    size=GROUP_SIZE,
                    index=index,
                    offset=offset,
                    time_ms=time_ms,
                    first_request_time_ms=group * 1000 // rate,
                    lifetime_ms=LIFETIME_MS,
                    payload=payload[:-8] + offset.to_bytes(8, "little"),
                )
            if due is not None:
                closed += 1
                state.acknowledged(due, closed)
            if offset % 256 == 0:
                state.committable()  # as a processor does from time to time: it forgets what is settled
            if offset % every == every - 1:
                held.append(tracemalloc.get_traced_memory()[0])
                opened.append(sum(1 for _ in state.open_payloads()))
    finally:
        tracemalloc.stop()
    steady = slice(
        0, num_groups * SAMPLES // (num_groups + 2 * rate * LIFETIME_MS // 1000)
    )  # without the end's decline
    return Flow(tuple(held[steady]), tuple(opened[steady]), closed)


def growth(values: tuple[int, ...]) -> float:
    """Rise of the fitted line from end to end, over the mean.

    >>> growth((10, 10, 10)), round(growth((9, 10, 11)), 3)
    (0.0, 0.2)
    """
    count, mean = len(values), sum(values) / len(values)
    middle = (count - 1) / 2
    spread = sum((at - middle) ** 2 for at in range(count))
    slope = sum((at - middle) * (value - mean) for at, value in enumerate(values)) / spread
    return slope * (count - 1) / mean


def held_encoded(payload: bytes) -> float:
    """Bytes that one open member costs in a partition's state, with the state's own share."""
    state: PartitionState[bytes] = PartitionState(0)
    tracemalloc.start()
    try:
        for number in range(NUM_HELD):
            state.add(
                f"g{number // (GROUP_SIZE - 1):08d}",
                size=GROUP_SIZE,
                index=number % (GROUP_SIZE - 1),
                offset=number,
                time_ms=number,
                first_request_time_ms=0,
                lifetime_ms=LIFETIME_MS,
                payload=payload[:-8] + number.to_bytes(8, "little"),
            )
        return tracemalloc.get_traced_memory()[0] / NUM_HELD
    finally:
        tracemalloc.stop()


def held_lists() -> float:
    """Bytes of one member decoded from Avro arrays to Python lists, in a dict of groups."""
    columns = make_columns(NUM_TOKENS)
    rival = ArrayRecords(columns)
    data = rival.encode(rival.record(make_record(columns, 0)))
    groups: dict[str, list[Any]] = {}
    tracemalloc.start()
    try:
        for number in range(NUM_HELD):
            groups.setdefault(f"g{number // (GROUP_SIZE - 1):08d}", []).append(rival.decode(data))
        return tracemalloc.get_traced_memory()[0] / NUM_HELD
    finally:
        tracemalloc.stop()


def sides(payload: bytes) -> list[Side]:
    """Reading one member and keeping it, in both forms."""
    columns = make_columns(NUM_TOKENS)
    rival = ArrayRecords(columns)
    arrays = rival.encode(rival.record(make_record(columns, 0)))

    def ours() -> bytes:
        decode(payload)
        return payload

    return [Side("ours", ours, len(payload)), Side("avro arrays to lists", lambda: rival.decode(arrays), len(arrays))]
