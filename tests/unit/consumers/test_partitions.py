"""The processor's partitions on a log in memory: poison, gaps, crashes at any call, frozen and doubled processors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from consumers import assignment
from consumers.assignment import Assigned
from consumers.partitions import Partitions
from infra.log import Committed, Place, TopicSpec
from infra.memory_log import MemoryLog
from schemas import codec
from schemas.codec import encode
from schemas.errors import DeadlineExceeded, LogGap, LogTruncated, SendFailed
from schemas.records import KEPT, Outcome, Trajectory
from support.generations import another, publish, published, written
from support.processor_scenes import (
    DEAD_LETTERS,
    GROUP_SIZE,
    POISON,
    SAMPLES,
    SOURCE,
    Crash,
    DeadlyLog,
    Event,
    append,
    buried,
    effective,
    filled,
    processor,
    records,
    scene,
    work_off,
)
from support.samples import close, trajectory

PLACE = Place(SOURCE, 0)
GROUP = "demo.main.process"


def _member(index: int, group: str = "g1", time_ms: int = 1000, **changes: object) -> Event:
    fields = {
        "group_size": GROUP_SIZE,
        "partition": 0,
        "first_request_time_ms": 1000,
        "lifetime_ms": 40,
        "reward": index / 2,
    }
    record = trajectory(group=group, index=index, **{**fields, **changes})
    return Event(time_ms, record.partition, encode(record))


def _close(group: str = "g1", time_ms: int = 1000) -> Event:
    return Event(time_ms, 0, encode(close(group=group, partition=0)))


def test_a_release_that_comes_while_it_runs_is_read_from_its_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema stands on the log before that; what another one writes without publishing stays a dead letter."""
    monkeypatch.setattr(codec, "_READERS", dict(codec._READERS))
    newer = another(Trajectory)
    log = filled([_member(0), Event(1000, 0, POISON["unknown-schema"])])
    log.create([TopicSpec("demo.schemas", 1)])
    partitions = processor(log)
    work_off(partitions, log)
    publish(log, "demo", published(newer))
    append(log, [Event(1000, 0, written(newer, event.value or b"")) for event in (_member(1), _member(2))])
    work_off(partitions, log)
    assert _dispositions(effective(log)) == [("g1", KEPT, 3)]
    assert [letter.offset for letter in buried(log)] == [1]


def _undisturbed(events: list[Event], partitions: int) -> list[Outcome]:
    log = filled(events, partitions)
    work_off(processor(log), log)
    return effective(log)


def _dispositions(outcomes: Iterable[Outcome]) -> list[tuple[str, str, int]]:
    return [(o.group, o.disposition, o.closing_offset) for o in outcomes]


def test_groups_close_when_complete_or_closed() -> None:
    events = [_member(0), _member(0, "g2"), _member(1), _close("g3"), _member(2), _member(1, "g2"), _close("g2")]
    log = filled(events)
    partitions = processor(log)
    work_off(partitions, log)
    assert _dispositions(effective(log)) == [("g1", KEPT, 4), ("g2", KEPT, 6)]
    first, second = effective(log)
    assert [m.advantage for m in first.members] == [-0.5, 0.0, 0.5]
    assert (first.closed_by, second.closed_by) == ("complete", "close")
    assert [(m.index, m.offset) for m in second.members] == [(0, 1), (1, 5)]
    assert log.committed(GROUP, [PLACE])[PLACE].offset == 7
    metrics = partitions.metrics()
    assert (metrics["outcomes"], metrics["kept"], metrics["lag"], metrics["open_groups"]) == (2, 2, 0, 0)


def test_late_and_superseded_members_are_counted_and_open_nothing() -> None:
    events = [
        _member(0), _member(1), _member(1, attempt=1), _close(), _member(2, time_ms=1010), _member(1, time_ms=1011),
        _member(0, "g2", time_ms=1041), _close("g2", time_ms=1042), _member(2, time_ms=2000),
    ]  # fmt: skip
    log = filled(events)
    partitions = processor(log)
    work_off(partitions, log)
    assert _dispositions(effective(log)) == [("g1", KEPT, 3)]
    assert partitions.metrics()["late"] == 3
    assert partitions.metrics()["superseded"] == 2
    assert partitions.metrics()["open_groups"] == 0


def test_poison_never_blocks_a_partition_and_is_buried_once() -> None:
    events = [_member(0)]
    for value in POISON.values():
        events += [Event(1000, 0, value)]
    events += [Event(1000, 0, b""), _member(1), _member(2)]
    log = filled(events)
    log.corrupt(PLACE, 1, b"found")
    work_off(processor(log), log)
    assert _dispositions(effective(log)) == [("g1", KEPT, len(events) - 1)]
    letters = buried(log)
    assert [letter.offset for letter in letters] == list(range(1, len(events) - 2))
    assert [letter.reason for letter in letters] == ["corrupt-batch", *list(POISON)[1:], "empty"]
    assert [letter.value for letter in letters] == [b"found", *list(POISON.values())[1:], b""]
    assert {(letter.topic, letter.partition, letter.time_ms) for letter in letters} == {(SOURCE, 0, 1000)}
    assert log.committed(GROUP, [PLACE])[PLACE].offset == len(events)
    work_off(processor(log), log)
    assert buried(log) == letters


def test_a_restart_does_not_bury_again_behind_an_open_group() -> None:
    log = filled([_member(0), Event(1000, 0, b"poison"), _member(1)])
    work_off(processor(log), log)
    assert log.committed(GROUP, [PLACE])[PLACE].offset == 0
    append(log, [_member(2)])
    work_off(processor(log), log)
    assert len(buried(log)) == 1
    assert _dispositions(effective(log)) == [("g1", KEPT, 3)]


def test_letters_that_are_too_large_are_cut() -> None:
    log = filled([Event(1000, 0, b"poison" * 20_000)])
    log._max_record_bytes = 100_000
    work_off(processor(log), log)
    (letter,) = buried(log)
    assert letter.value == (b"poison" * 20_000)[: 16 * 1024]
    assert "120000 bytes, SHA-256" in letter.detail


def test_an_outcome_that_is_too_large_drops_its_group_and_the_chain_goes_on() -> None:
    log = filled([_member(i) for i in range(3)] + [_member(i, "g2") for i in range(3)])
    sizes = [len(encode(outcome)) for outcome in _undisturbed([_member(i) for i in range(3)], 1)]
    log._max_record_bytes = sizes[0] - 1
    partitions = processor(log)
    work_off(partitions, log)
    assert _dispositions(effective(log)) == [("g1", "too-large", 2), ("g2", "too-large", 5)]
    assert partitions.metrics()["dropped:too-large"] == 2
    log.close()


def test_nothing_is_committed_before_everything_is_acknowledged() -> None:
    log = filled([_member(0), Event(1000, 0, b"poison"), _member(1), _member(2)])
    for _ in range(2):  # the outcome, then the dead letter
        log.fail_sends(1)
        partitions = processor(log)
        with pytest.raises(SendFailed):
            partitions.work(0.0)
        partitions.discard()
        assert log.committed(GROUP, [PLACE]) == {}
    log.stall()
    partitions = processor(log)
    partitions._patience_s = 0.0
    with pytest.raises(DeadlineExceeded):
        partitions.work(0.0)
    partitions.discard()
    assert log.committed(GROUP, [PLACE]) == {}
    log.resume()
    work_off(processor(log), log)
    assert _dispositions(effective(log)) == [("g1", KEPT, 3)]
    assert len(buried(log)) == 1


def test_records_that_arrived_though_their_send_failed_are_repeats_without_effect() -> None:
    log = filled([_member(0), _member(1), _member(2)])
    log.fail_sends(1, present=True)
    partitions = processor(log)
    with pytest.raises(SendFailed):
        partitions.work(0.0)
    partitions.discard()
    work_off(partitions, log)
    assert _dispositions(effective(log)) == [("g1", KEPT, 2)]


def test_removed_records_are_a_gap_with_its_size_and_the_rest_goes_on() -> None:
    events = [_member(i, f"g{n}") for n in range(4) for i in range(3)]
    log = filled(events)
    partitions = processor(log)
    work_off(partitions, log)
    append(log, [_member(i, f"g{n}") for n in range(4, 8) for i in range(3)])
    log.delete_before(PLACE, 17)  # twelve are read; five more go unread
    with pytest.raises(LogGap):
        partitions.work(0.0)
    partitions.discard()
    work_off(partitions, log)
    assert partitions.metrics()["gap_records"] == 5
    assert [o.group for o in effective(log)] == ["g0", "g1", "g2", "g3", "g6", "g7"]
    assert partitions.metrics()["open_groups"] == 1  # one member of g5 is left; the dispatcher will close it


def test_a_log_shorter_than_what_was_committed_is_refused() -> None:
    log = filled([_member(0)])
    log.commit(GROUP, {PLACE: Committed(5)})
    with pytest.raises(LogTruncated, match="the position is 5, but the log ends at 1"):
        processor(log).work(0.0)
    log.commit(GROUP, {PLACE: Committed(0, '{"samples":3,"last":7}')})
    with pytest.raises(LogTruncated, match="up to offset 3"):
        processor(log).work(0.0)


def test_a_lost_note_costs_a_longer_reading_and_nothing_else() -> None:
    rng = random.Random(5)
    events = scene(rng)
    log = filled(events)
    half = processor(DeadlyLog(log, rng, 0.0))
    for _ in range(20):
        half.work(0.0)
    committed = log.committed(GROUP, [PLACE])[PLACE]
    log.commit(GROUP, {PLACE: Committed(committed.offset, "not ours")})
    work_off(processor(log), log)
    assert effective(log) == _undisturbed(events, 1)


def _disturbed(seed: int, events: list[Event], partitions: int) -> MemoryLog:
    """Processors that die at any call, freeze and come back, beside one another; one of them gets through in the end."""
    rng = random.Random(seed)
    log = filled(events, partitions)
    deadly = DeadlyLog(log, rng, deadliness=0.02)
    alive = [processor(deadly, commit_every_s=rng.choice([0.0, 1e9])) for _ in range(2)]
    zombies: list[Partitions] = []
    for _ in range(rng.randint(40, 120)):
        slot = rng.randrange(2)
        if rng.random() < 0.1:
            log.fail_sends(rng.randint(1, 3), present=rng.random() < 0.5)
        actor = rng.choice(zombies) if zombies and rng.random() < 0.2 else alive[slot]
        try:
            actor.work(0.0)
        except SendFailed:
            actor.discard()
        except Crash:
            if actor is alive[slot]:
                alive[slot] = processor(deadly, commit_every_s=rng.choice([0.0, 1e9]))
            else:
                zombies.remove(actor)
        if rng.random() < 0.05:  # frozen; perhaps it comes back later, with all it remembers
            zombies.append(alive[slot])
            alive[slot] = processor(deadly)
    log._failing.clear()
    deadly.deadliness = 0.0
    work_off(processor(deadly), log)
    for zombie in zombies:
        try:
            work_off(zombie, log)
        except SendFailed:  # its writer was finished before it froze
            zombie.discard()
    return log


@pytest.mark.parametrize("seed", range(30))
def test_crashes_freezes_and_doubles_have_no_effect(seed: int) -> None:
    partitions = 1 + seed % 2
    events = scene(random.Random(seed), partitions=partitions)
    log = _disturbed(seed, events, partitions)
    expected = _undisturbed(events, partitions)
    assert effective(log) == expected
    assert len(records(log, SAMPLES)) >= len(expected)
    clean = filled(events, partitions)
    work_off(processor(clean), clean)
    origins = Counter((letter.partition, letter.offset) for letter in buried(clean))
    assert max(origins.values(), default=1) == 1
    assert {(letter.partition, letter.offset) for letter in buried(log)} == origins.keys()


def _commit_all(self: Assigned) -> Committed | None:
    return Committed(self.state.position, "")


def _settle_blindly(self: Partitions) -> None:
    for sent in self._sent:
        if sent.due is not None:
            self._assigned[sent.partition].state.acknowledged(sent.due, 0)
    self._sent.clear()


@pytest.mark.parametrize(
    "bug", ["commits everything polled", "reads nothing back", "does not wait for acknowledgements"]
)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "commits everything polled":
        monkeypatch.setattr(Assigned, "committable", _commit_all)
    elif bug == "reads nothing back":
        monkeypatch.setattr(assignment, "_read_back", lambda *args: None)
    else:
        monkeypatch.setattr(Partitions, "_settle", _settle_blindly)
    for seed in range(30):
        events = scene(random.Random(seed))
        try:
            if effective(_disturbed(seed, events, 1)) != _undisturbed(events, 1):
                return
        except AssertionError:
            return
    raise AssertionError(f"a processor that {bug} was not found out by 30 seeds")


def test_dead_letters_of_all_partitions_meet_in_one() -> None:
    log = filled([Event(1000, p, b"poison") for p in (0, 1, 1)], partitions=2)
    work_off(processor(log), log)
    keys = [envelope.key for envelope in records(log, DEAD_LETTERS)]
    assert sorted(keys, key=str) == [f"{SOURCE}/{p}/{o}".encode() for p, o in ((0, 0), (1, 0), (1, 1))]
