"""The dispatcher on a log in memory, turn by turn: what it asks, when it asks again, what it closes, how it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from infra.heartbeat import Heart
from infra.settings import Settings
from producers.dispatcher import Dispatching
from schemas.errors import SendFailed, Superseded
from schemas.records import Claim, State
from support.dispatch_scene import Scene
from support.loop import Clock, append, make_daemon, said
from support.samples import announcement, trajectory


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    clock = Clock()
    monkeypatch.setattr("producers.dispatcher.time", clock)
    found = Scene(tmp_path, clock)
    yield found
    found.dispatcher.close()


def test_it_claims_every_inbox_and_says_so_on_control(scene: Scene) -> None:
    claims = [record for record in said(scene.log, "requests") if isinstance(record, Claim)]
    assert [(c.role, c.epoch) for c in claims] == [("dispatch", 1)] * 3
    assert [r for r in said(scene.log, "control") if isinstance(r, Claim)] == claims[:1]


def test_nothing_is_asked_before_version_0_and_a_worker_are_there(scene: Scene) -> None:
    scene.worker("s1")
    scene.turn()
    assert scene.asked() == []
    append(scene.log, "weights", announcement(version=0))
    scene.turn()
    assert len(scene.asked()) == 12, "(eta + 1) B = 4 groups of 3"


def test_what_a_request_says(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    asked = scene.asked()
    assert {(r.group, r.index, r.attempt, r.partition) for r in asked[:4]} == {
        ("g00000000", 0, 0, 0), ("g00000000", 1, 0, 0), ("g00000000", 2, 0, 0), ("g00000001", 0, 0, 1),
    }  # fmt: skip
    assert len({r.seed for r in asked}) == 12 and len({(r.group, r.item) for r in asked}) == 4
    assert {(r.epoch, r.first_request_time_ms, r.session, r.lifetime_ms) for r in asked} == {(1, 0, "s1", 6000)}


def test_it_never_asks_for_more_than_admission_allows(scene: Scene) -> None:
    scene.ready()
    for _ in range(3):
        scene.turn()
    assert len(scene.asked()) == 12
    scene.end("g00000000", 5, kept=True)
    scene.turn()
    assert len(scene.asked()) == 12, "kept and not planned counts"
    scene.end("g00000001", 5, kept=False)
    scene.turn()
    assert len(scene.asked()) == 15


def test_a_lost_member_is_asked_of_another_worker_with_its_first_time(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    first_ms = scene.clock.ms()
    for request in scene.asked()[1:]:
        scene.answer(request)
    scene.worker("s2", inbox=2)
    scene.worker("s1", State.LEFT)
    scene.turn(0.5)
    again = [request for request in scene.asked() if request.attempt]
    assert [(r.group, r.index, r.session, r.first_request_time_ms) for r in again] == [("g00000000", 0, "s2", first_ms)]
    for _ in range(3):
        scene.worker("s2", inbox=2)
        scene.turn(1.0)
    assert len([request for request in scene.asked() if request.attempt]) == 1


def test_a_group_is_closed_when_its_lifetime_is_over_and_not_before(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    scene.answer(scene.asked()[0])
    for _ in range(11):
        scene.turn(0.5)
    assert scene.closes() == []
    scene.turn(1.0)
    assert sorted(c.group for c in scene.closes()) == [f"g{n:08d}" for n in range(4)]
    assert {c.reason for c in scene.closes()} == {"lifetime"}
    scene.turn()
    assert scene.dispatcher.state.void_groups == 3
    assert scene.dispatcher.state.running == 1, "the one with a member waits for its outcome"
    assert len(scene.closes()) == 4


def test_a_successor_asks_for_what_was_never_asked_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.ready()
    sends = 0
    real = scene.dispatcher._asker._writer.send

    def send(*args: Any, **kwargs: Any) -> Any:
        nonlocal sends
        sends += 1
        if sends > 4:
            raise SendFailed("the process is gone")
        return real(*args, **kwargs)

    monkeypatch.setattr(scene.dispatcher._asker._writer, "send", send)
    with pytest.raises(SendFailed):
        scene.turn()
    assert len(scene.asked()) == 4
    scene.dispatcher.close()
    scene.dispatcher = scene.start()
    scene.turn()
    asked = [(r.group, r.index) for r in scene.asked()]
    assert len(asked) == len(set(asked)) == 12
    assert {r.epoch for r in scene.asked()} == {1, 2}


def test_a_successor_knows_what_arrived(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    for request in scene.asked()[:3]:
        scene.answer(request)
    scene.dispatcher.close()
    scene.dispatcher = scene.start()
    state = scene.dispatcher.state
    assert (state.running, state.next_number) == (4, 4)
    assert state.groups["g00000000"].opened and not state.groups["g00000001"].opened
    assert state.workers["s1"].outstanding == 9
    scene.turn()
    assert len(scene.asked()) == 12


def test_of_two_the_newer_goes_on(scene: Scene) -> None:
    scene.ready()
    newer = scene.start()
    with pytest.raises(Superseded):
        scene.turn()
    assert scene.asked() == []
    newer.turn()
    assert {r.epoch for r in scene.asked()} == {2}
    newer.close()


def test_groups_of_a_superseded_dispatcher_are_closed_at_once(scene: Scene) -> None:
    scene.ready()
    append(
        scene.log, "trajectories",
        trajectory(group="g00000009", partition=1, first_request_time_ms=scene.clock.ms(), lifetime_ms=6000), partition=1,
    )  # fmt: skip
    scene.turn()
    scene.turn()
    assert [(c.group, c.partition, c.reason) for c in scene.closes()] == [("g00000009", 1, "stray")]
    assert sorted({request.group for request in scene.asked()}) == [f"g{n:08d}" for n in range(4)]
    scene.end("g00000001", 5, kept=False)
    for number in range(4, 9):
        scene.dispatcher.state.numbers.end(number)
    scene.turn()
    assert max(request.group for request in scene.asked()) == "g00000010", "the stray's own number is taken"


def test_records_that_cannot_be_trained_on_do_not_count_as_arrived(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    scene.answer(scene.asked()[0], tokens=b"12345")
    scene.turn()
    assert not scene.dispatcher.state.groups["g00000000"].opened


def test_the_end_of_a_run_closes_what_is_open(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    scene.answer(scene.asked()[0])
    scene.dispatcher.end()
    assert scene.closes() == [], "the run has not ended: a successor goes on with its groups"
    scene.dispatcher.state.ledger.plans.extend([(n, cast(Any, None)) for n in range(10)])
    scene.worker("s1", State.LEFT)
    scene.dispatcher.end()
    assert [(c.group, c.reason) for c in scene.closes()] == [("g00000000", "run-ended")], "only this one is open"


def test_the_end_waits_a_while_for_a_worker_that_lives(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.ready()
    scene.turn()
    scene.dispatcher.state.ledger.plans.extend([(n, cast(Any, None)) for n in range(10)])
    reads = 0

    def read(timeout_s: float) -> None:
        nonlocal reads
        reads += 1
        scene.clock.now_s += 1.0
        if reads == 1:
            scene.answer(scene.asked()[0])
            scene.worker("s1", State.LEFT)

    monkeypatch.setattr(scene.dispatcher, "_read", read)
    scene.dispatcher.end()
    assert reads == 1
    assert [c.group for c in scene.closes()] == ["g00000000"]


def test_a_broker_that_is_away_is_waited_for(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.ready()
    dispatching = Dispatching(make_daemon(scene.log, scene.settings), cast(Heart, scene.heart))
    scene.log.away = True
    assert [dispatching.turn() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    scene.log.away = False
    assert dispatching.turn() == 0.0
    assert len(scene.asked()) == 12
    scene.end("g00000001", 5, kept=False)
    scene.log.fail_sends(1, present=True)
    rests = [dispatching.turn() for _ in range(8)]
    assert [rest for rest in rests if rest] == [0.5]
    assert len({(r.group, r.index) for r in scene.asked()}) == len(scene.asked()) == 15
    assert capsys.readouterr().out.count("disturbed") == 2, "once for each trouble"
    dispatching.close()


def test_settings_of_the_run(scene: Scene) -> None:
    settings: Settings = scene.settings
    limits = scene.dispatcher.state.limits
    assert (limits.group_size, limits.batch_groups) == (3, 2)
    assert limits.stop_at == settings.policies["main"].train.stop_at
