"""Slow components, lost positions, rewinds, bounded memory, removed records: the processor's bad days, in memory."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from consumers.partitions import Partitions
from consumers.processor import run
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Committed, Place, TopicSpec
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from schemas.codec import decode, encode
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import Heartbeat, Role, Segment, State, VersionRun
from support.processor_scenes import (
    DEAD_LETTERS,
    GROUP_SIZE,
    SOURCE,
    Event,
    append,
    buried,
    effective,
    filled,
    processor,
    records,
    work_off,
)
from support.samples import close, trajectory

PLACE = Place(SOURCE, 0)
GROUP = "demo.main.process"
HEARTBEAT_S = 0.02


def _member(group: str, index: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "group_size": GROUP_SIZE, "partition": 0, "first_request_time_ms": 1000, "lifetime_ms": 10**9, "reward": index / 2
    }  # fmt: skip
    return Event(1000, 0, encode(trajectory(group=group, index=index, **{**fields, **changes})))


def _groups(count: int) -> list[Event]:
    return [_member(f"g{n:08d}", i) for n in range(count) for i in range(GROUP_SIZE)]


@contextmanager
def _running(log: MemoryLog, *names: str) -> Iterator[None]:
    policy = {
        "model": "model",
        "process": {"advantage": "support.processor_components:slow_once", "commit_every_s": 0.01},
        "dispatch": {"group_size": GROUP_SIZE, "heartbeat_timeout_s": 100 * HEARTBEAT_S},
        "rollout": {"heartbeat_s": HEARTBEAT_S},
    }
    settings = Settings.model_validate({"run": {"name": "demo"}, "policies": {"main": policy}})
    stops = [Stop() for _ in names]
    threads = [
        threading.Thread(target=run, args=(Daemon(settings, "main", name, "", log, MemoryStore(), stop),))
        for name, stop in zip(names, stops, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for stop in stops:
            stop.request()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def _beats(log: MemoryLog) -> list[tuple[Heartbeat, int]]:
    found = [(decode(e.value), e.time_ms) for e in records(log, "demo.control")]
    return [(record, time_ms) for record, time_ms in found if isinstance(record, Heartbeat)]


def _names(log: MemoryLog, start: int) -> list[str]:
    return [beat.name for beat, _ in _beats(log)[start:]]


def _until(found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)


def test_a_slow_component_stops_no_heartbeat_and_doubles_nothing() -> None:
    """Of 21 groups the first takes long, as one of 9 s would: nobody is taken for lost, 21 results stand once."""
    from support.processor_components import SLOW

    SLOW.clear()
    SLOW.hold.clear()
    log = MemoryLog()
    log.create([TopicSpec(name, 1) for name in (SOURCE, "demo.main.samples", DEAD_LETTERS, "demo.control")])
    now_ms = log.clock_ms()
    events = [_member(f"g{n:08d}", i, first_request_time_ms=now_ms) for n in range(21) for i in range(GROUP_SIZE)]
    with _running(log, "one", "two"):
        _until(lambda: {b.name for b, _ in _beats(log) if b.metrics.get("processors") == 2} == {"one", "two"})
        writer = log.writer()
        for event in events:
            writer.send(SOURCE, 0, event.value or b"")
        writer.close()
        assert SLOW.entered.wait(20)
        before = len(_beats(log))
        _until(lambda: min(_names(log, before).count(name) for name in ("one", "two")) >= 20)  # the slow one as well
        SLOW.hold.set()
        _until(lambda: len(effective(log)) == 21)
    assert [o.group for o in effective(log)] == [f"g{n:08d}" for n in range(21)]
    assert len(records(log, "demo.main.samples")) == 21
    assert SLOW.times == 1, "another processor did the slow work as well"
    assert _beats(log)[-1][0].state is State.LEFT


def test_lost_positions_cost_a_longer_reading_and_nothing_else() -> None:
    log = filled([*_groups(10), Event(1000, 0, b"poison"), _member("open", 0)])
    work_off(processor(log), log)
    before, stand, letters = effective(log), len(records(log, "demo.main.samples")), len(buried(log))
    log._committed.clear()
    append(log, [_member("open", i) for i in (1, 2)])
    work_off(processor(log), log)
    assert effective(log)[:10] == before
    assert [o.group for o in effective(log)[10:]] == ["open"]
    assert len(records(log, "demo.main.samples")) == stand + 1
    assert {letter.offset for letter in buried(log)} == {letter.offset for letter in buried(log)[:letters]}


@pytest.mark.parametrize("offset", [0, 5, 17, 29])
def test_a_rewound_position_changes_nothing(offset: int) -> None:
    log = filled([*_groups(10), _member("open", 0)])
    work_off(processor(log), log)
    before, stand = effective(log), len(records(log, "demo.main.samples"))
    stored = log.committed(GROUP, [PLACE])[PLACE]
    log.commit(GROUP, {PLACE: Committed(offset, stored.note)})
    append(log, [_member("open", i) for i in (1, 2)])
    work_off(processor(log), log)
    assert effective(log)[:10] == before
    assert [o.group for o in effective(log)[10:]] == ["open"]
    assert len(records(log, "demo.main.samples")) == stand + 1


def test_a_gap_has_its_exact_size_and_reading_goes_on_behind_it() -> None:
    """100 records, a position of 10, records before 50 removed: goes on at 50, reads 50 of them, says that 40 are gone."""
    log = filled(_groups(34)[:100])
    log.commit(GROUP, {PLACE: Committed(10, "")})
    log.delete_before(PLACE, 50)
    partitions = processor(log)
    work_off(partitions, log)
    metrics = partitions.metrics()
    assert (metrics["gap_records"], metrics["trajectories"]) == (40, 50)
    assert [o.closing_offset for o in effective(log)] == list(range(53, 99, 3))  # what is left of g16 stays open


def test_a_gap_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    log = filled(_groups(34)[:100])
    log.commit(GROUP, {PLACE: Committed(10, "")})
    log.delete_before(PLACE, 50)
    processor(log).work(0.0)
    said = next(line for line in capsys.readouterr().out.splitlines() if "unread records were removed" in line)
    assert f"{SOURCE}[0]" in said
    assert "40" in said


TOKENS = 2048


def _long(group: str, index: int) -> Event:
    columns = {
        "segments": (Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, TOKENS - 3)),
        "tokens": pack_ints(np.arange(TOKENS, dtype=np.int32)),
        "loss_mask": pack_bits([False] * 3 + [True] * (TOKENS - 3)),
        "logprobs": pack_floats([-0.5] * (TOKENS - 3)),
        "versions": (VersionRun(1, 1, TOKENS - 3),),
    }
    return _member(group, index, **columns)


def _held_bytes(partitions: Partitions) -> float:
    return sum(len(payload) for a in partitions._assigned.values() for payload in a.state.open_payloads())


def test_memory_stays_flat_while_members_are_lost() -> None:
    """One member in a hundred is lost and its group closed later: what is held does not grow, and is not decoded."""
    log = filled([])
    partitions = processor(log, min_members=2)
    held: list[float] = []
    waiting: list[str] = []
    for n in range(600):
        group = f"g{n:08d}"
        lost = n % 33 == 0
        append(log, [_long(group, i) for i in range(GROUP_SIZE - lost)])
        if lost:
            waiting.append(group)
        if len(waiting) > 2:  # the dispatcher gives up some time later
            append(log, [Event(1000, 0, encode(close(group=waiting.pop(0), partition=0)))])
        partitions.work(0.0)
        held.append(_held_bytes(partitions))
        log.partition(Place("demo.main.samples", 0)).records.clear()
        log.delete_before(PLACE, log.bounds(SOURCE)[0].end)
    assert max(held[300:]) == max(held[100:300]) > 0
    assert max(held) < 3 * 2 * 1.01 * len(_long("g", 0).value or b"")


def test_held_members_are_a_quarter_of_decoded_lists_at_most() -> None:
    event = _long("g", 0)
    record = decode(event.value)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    lists = [
        np.frombuffer(record.tokens, "<i4").tolist(),  # type: ignore[union-attr]
        np.frombuffer(record.logprobs, "<f4").tolist(),  # type: ignore[union-attr]
        [True] * TOKENS,
    ]
    as_lists = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(lists) == 3
    assert len(event.value or b"") <= 0.25 * as_lists
