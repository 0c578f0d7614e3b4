"""Processors that share a policy: each its part, taken over when one leaves, dies or freezes; outcomes stay the same."""

from __future__ import annotations

import random

import pytest

from consumers.processor import Processor
from consumers.sharing import Sharing
from infra.log import Place, TopicSpec
from infra.memory_log import MemoryLog
from schemas.codec import encode
from schemas.errors import BrokerError
from schemas.records import State
from support.processor_scenes import (
    SOURCE,
    Clock,
    Event,
    append,
    effective,
    filled,
    processor,
    records,
    scene,
    work_off,
)
from support.samples import heartbeat

TIMEOUT_S = 8.0
PARTITIONS = 4


class Team:
    """Processors of one policy on one log, whose heartbeats the test sends."""

    def __init__(self, seed: int = 0) -> None:
        self.events = scene(random.Random(seed), groups=60, partitions=PARTITIONS)
        half = len(self.events) // 2
        self.log = filled(self.events[:half], PARTITIONS)
        self.rest = self.events[half:]
        self.log.create([TopicSpec("demo.control", 1)])

    def join(self, session: str) -> Processor:
        self.beat(session)
        sharing = Sharing(self.log, "demo", "main", session, timeout_s=TIMEOUT_S, patience_s=5.0)
        return Processor(processor(self.log), sharing)

    def beat(self, session: str, state: State = State.SERVING) -> None:
        writer = self.log.writer()
        record = heartbeat(role="process", name=session, session=session, state=state)
        writer.send("demo.control", 0, encode(record), key=session.encode()).result(1.0)
        writer.close()

    def pass_s(self, seconds: float) -> None:
        assert isinstance(self.log.clock_ms, Clock)
        self.log.clock_ms.now_ms += int(seconds * 1000)

    def undisturbed(self) -> MemoryLog:
        """The same records with the same append times, processed by one alone."""
        stand = sorted(records(self.log, SOURCE), key=lambda e: (e.time_ms, e.partition, e.offset))
        log = filled([Event(e.time_ms, e.partition, e.value) for e in stand], PARTITIONS)
        work_off(processor(log), log)
        return log


def _owned(*processors: Processor) -> list[set[int]]:
    return [set(one.partitions.positions) for one in processors]


def _turns(*processors: Processor, count: int = 2) -> None:
    for _ in range(count):
        for one in processors:
            one.turn(0.0)


def _finish(team: Team, *processors: Processor) -> None:
    for _ in range(1000):
        _turns(*processors, count=1)
        positions: dict[int, int] = {}
        for one in processors:
            positions.update(one.partitions.positions)
        if all(positions.get(p, 0) >= bounds.end for p, bounds in team.log.bounds(SOURCE).items()):
            return
    raise AssertionError("the end of the log was never reached")


def test_one_has_everything_and_two_have_half_each() -> None:
    team = Team()
    first = team.join("aaaa")
    _turns(first)
    assert _owned(first) == [{0, 1, 2, 3}]
    second = team.join("bbbb")
    _turns(second, first)
    assert _owned(first)[0] | _owned(second)[0] == {0, 1, 2, 3}
    assert [len(mine) for mine in _owned(first, second)] == [2, 2]
    assert (first.metrics()["processors"], first.metrics()["partitions"]) == (2, 2)
    append(team.log, team.rest)
    _finish(team, first, second)
    assert effective(team.log) == effective(team.undisturbed())


def test_who_leaves_is_followed_at_once() -> None:
    team = Team()
    first, second = team.join("aaaa"), team.join("bbbb")
    _turns(first, second)
    second.drain()
    second.close()
    team.beat("bbbb", State.LEFT)
    _turns(first)
    assert _owned(first) == [{0, 1, 2, 3}]
    append(team.log, team.rest)
    _finish(team, first)
    assert effective(team.log) == effective(team.undisturbed())


@pytest.mark.parametrize("seed", range(8))
def test_a_frozen_one_is_taken_over_and_does_no_harm_when_it_comes_back(seed: int) -> None:
    team = Team(seed)
    first, second = team.join("aaaa"), team.join("bbbb")
    _turns(first, second, count=1)
    append(team.log, team.rest[: len(team.rest) // 2])
    team.pass_s(TIMEOUT_S + 1)
    team.beat("aaaa")
    _turns(first)
    assert _owned(first) == [{0, 1, 2, 3}]
    append(team.log, team.rest[len(team.rest) // 2 :])
    _finish(team, first)
    second.partitions.work(0.0)  # what it held when it froze
    team.beat("bbbb")
    _turns(second, first)
    assert [len(mine) for mine in _owned(first, second)] == [2, 2]
    assert effective(team.log) == effective(team.undisturbed())


def test_more_processors_than_partitions_leave_some_without_work() -> None:
    team = Team()
    sessions = [f"{n:08x}" for n in range(6)]
    members = [team.join(session) for session in sessions]
    _turns(*members)
    assert sorted(len(mine) for mine in _owned(*members)) == [0, 0, 1, 1, 1, 1]
    idle = next(one for one in members if not one.partitions.positions)
    assert idle.turn(0.25) == 0.25  # it rests, and looks again


def test_a_session_that_nobody_has_heard_works_all_the_same() -> None:
    team = Team()
    sharing = Sharing(team.log, "demo", "main", "unheard", timeout_s=TIMEOUT_S, patience_s=5.0)
    alone = Processor(processor(team.log), sharing)
    _turns(alone)
    assert _owned(alone) == [{0, 1, 2, 3}]


def test_an_error_gives_everything_up_and_a_later_turn_goes_on() -> None:
    team = Team()
    first = team.join("aaaa")
    _turns(first)
    team.log.away = True
    assert first.turn(0.0) > 0.0
    assert first.partitions.positions == {}
    team.log.away = False
    append(team.log, team.rest)
    _finish(team, first)
    assert effective(team.log) == effective(team.undisturbed())


def test_a_share_that_changes_commits_what_is_let_go() -> None:
    team = Team()
    first = team.join("aaaa")
    first.partitions._commit_every_s = 1e9
    _turns(first)
    held = first.partitions.positions
    team.join("bbbb")
    _turns(first)
    lost = held.keys() - first.partitions.positions.keys()
    places = [Place(SOURCE, p) for p in lost]
    assert set(team.log.committed("demo.main.process", places)) == set(places)


def test_a_control_topic_that_does_not_answer_is_an_error_that_passes() -> None:
    team = Team()
    sharing = Sharing(team.log, "nothing", "main", "aaaa", timeout_s=TIMEOUT_S, patience_s=0.1)
    with pytest.raises(BrokerError, match=r"nothing\.control"):
        sharing.share(4)
    assert Processor(processor(team.log), sharing).turn(0.0) == 0.25
