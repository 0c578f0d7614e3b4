"""Members kept decoded: within their bound, gone when their group is, and without any effect on outcomes."""

from __future__ import annotations

import random

import pytest

from consumers import member_cache
from consumers.member_cache import MemberCache
from infra.memory_log import MemoryLog
from schemas.codec import encode
from schemas.records import Outcome
from support.processor_scenes import GROUP_SIZE, Event, append, effective, filled, processor, scene, work_off
from support.samples import trajectory


def _members(group: str, count: int) -> list[Event]:
    base = {"group": group, "group_size": GROUP_SIZE, "partition": 0, "first_request_time_ms": 1000, "lifetime_ms": 900}
    return [Event(1000, 0, encode(trajectory(index=i, reward=i / 2, **base))) for i in range(count)]


def test_what_is_taken_is_the_same_record_whether_it_was_kept_or_not() -> None:
    record = trajectory()
    data = encode(record)
    cache = MemberCache()
    cache.keep(0, 7, record, len(data))
    assert cache.take(0, 7, data) is record
    again = cache.take(0, 7, data)
    assert again is not record and again == record


def test_no_more_is_kept_than_fits_and_nothing_is_thrown_out_for_it() -> None:
    record = trajectory()
    size = len(encode(record))
    cache = MemberCache(largest_bytes=3 * (size + member_cache._OBJECTS_BYTES) + 1)
    for offset in range(10):
        cache.keep(0, offset, record, size)
        cache.keep(0, offset, record, size)
    assert len(cache) == 3 and cache.left_bytes == 1
    assert cache.take(0, 0, b"") is record  # the oldest are still there, and their room is free again
    cache.keep(1, 0, record, size)
    assert len(cache) == 3 and cache.left_bytes == 1
    cache.forget(0, below=2)
    assert len(cache) == 2
    cache.forget(1)
    assert len(cache) == 1
    cache.forget()
    assert len(cache) == 0 and cache.left_bytes == 3 * (size + member_cache._OBJECTS_BYTES) + 1


def _outcomes(log: MemoryLog, room_bytes: int) -> list[Outcome]:
    partitions = processor(log)
    partitions._decoded = MemberCache(room_bytes)
    work_off(partitions, log)
    return effective(log)


@pytest.mark.parametrize("seed", range(4))
def test_outcomes_are_the_same_with_and_without_room(seed: int) -> None:
    events = scene(random.Random(seed))
    without, little, much = (_outcomes(filled(events), room) for room in (0, 20_000, 10**9))
    assert without == little == much and without


def test_a_member_is_decoded_once_and_leaves_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_cache, "decode", lambda data: pytest.fail("decoded a second time"))
    log = filled(_members("g1", GROUP_SIZE) + _members("g2", 1))
    partitions = processor(log)
    work_off(partitions, log)
    assert [outcome.group for outcome in effective(log)] == ["g1"]
    assert len(partitions._decoded) == 1
    partitions.discard()
    assert len(partitions._decoded) == 0


def test_members_whose_outcome_stands_already_do_not_stay() -> None:
    log = filled(_members("g1", 1) + _members("g2", GROUP_SIZE))
    first = processor(log)
    work_off(first, log)  # g2 is written, but g1 holds the position at its own member
    second = processor(log)
    work_off(second, log)
    append(log, _members("g1", GROUP_SIZE)[1:])
    work_off(second, log)
    assert [outcome.group for outcome in effective(log)] == ["g2", "g1"]
    assert len(second._decoded) == 0


def test_members_of_partitions_that_are_let_go_do_not_stay() -> None:
    log = filled(_members("g1", 2))
    partitions = processor(log)
    partitions.own({0})
    partitions.work(0.0)
    assert len(partitions._decoded) == 2
    partitions.own(set())
    assert len(partitions._decoded) == 0
