"""A standby acts only when no other dispatcher lives; who was overtaken ends, also when it comes back from the dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from infra.heartbeat import Heart
from infra.lifecycle import Stop
from producers.dispatcher import Dispatching
from producers.standby import Owners, wait_for_turn
from schemas.errors import Superseded
from schemas.records import Claim, Heartbeat, State
from support.dispatch_scene import Scene
from support.loop import Clock, StubHeart, append, make_daemon, make_log, make_settings, said
from support.samples import heartbeat


def beat(session: str, state: State = State.SERVING, epoch: int = 0, **changes: Any) -> Heartbeat:
    fields = {"role": "dispatch", "name": f"d-{session}", "session": session, "state": state, "epoch": epoch, **changes}
    return heartbeat(**fields)


def claim(epoch: int, **changes: Any) -> Claim:
    return Claim(**{"run": "demo", "policy": "main", "role": "dispatch", "epoch": epoch, "nonce": "n", **changes})


def test_who_lives_follows_from_claims_and_heartbeats() -> None:
    owners = Owners("main", 8.0)
    assert owners.alive(0.0) == "", "nobody ever dispatched"
    owners.saw(beat("a", State.STARTING), 0.0)
    assert owners.alive(0.0) == "", "another standby, or one that has not claimed yet"
    owners.saw(claim(1), 1.0)
    assert owners.alive(5.0) == "epoch 1", "its owner's first heartbeat comes after it"
    owners.saw(beat("a", epoch=1), 6.0)
    assert owners.alive(14.0) == "d-a" and owners.alive(14.1) == ""
    owners.saw(beat("a", State.STARTING), 15.0)
    assert owners.alive(20.0) == "d-a", "it reads the log again"
    owners.saw(beat("a", State.LEFT), 20.0)
    assert owners.alive(20.0) == "", "at once"
    owners.saw(claim(2), 21.0)
    assert owners.alive(21.0) == "epoch 2"


@pytest.mark.parametrize("other", [{"role": "train"}, {"policy": "other"}, {"role": "rollout"}])
def test_others_do_not_matter(other: dict[str, Any]) -> None:
    owners = Owners("main", 8.0)
    owners.saw(beat("a", epoch=1, **other), 0.0)
    owners.saw(claim(1, **other), 0.0)
    assert owners.alive(0.0) == ""


def test_of_several_the_newest_claim_is_waited_for_and_a_silent_one_is_not() -> None:
    owners = Owners("main", 8.0)
    owners.saw(beat("a", epoch=1), 0.0)
    owners.saw(beat("b", epoch=2), 5.0)
    assert owners.alive(6.0) == owners.alive(10.0) == "d-b"
    owners.heard_nothing(100.0)
    assert owners.alive(107.0) == "d-b", "the log was away: silence means nothing"


class Waiting:
    """A standby whose every rest is a moment in which a test may do something."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("producers.standby.time", self.clock)
        self.settings = make_settings(folder, dispatch={"standby": True, "heartbeat_timeout_s": 8.0})
        self.log = make_log(self.settings, clock_ms=self.clock.ms)
        self.heart = StubHeart("standby")
        self.script: dict[int, Any] = {}
        self.rests = 0
        scene = self

        class Moments(Stop):
            def wait(self, timeout_s: float) -> bool:
                scene.rests += 1
                scene.clock.now_s += 1.0
                scene.script.get(scene.rests, lambda: None)()
                assert scene.rests < 100, "it waits for ever"
                return self.requested

        self.stop = Moments()

    def say(self, *records: Any) -> None:
        append(self.log, "control", *records)

    def wait(self) -> int:
        """Until it takes over; how many rests of a second that took."""
        wait_for_turn(make_daemon(self.log, self.settings, stop=self.stop), cast(Heart, self.heart))
        return self.rests


def test_a_standby_goes_at_once_where_nobody_dispatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Waiting(tmp_path, monkeypatch).wait() == 0


def test_a_standby_waits_for_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(tmp_path, monkeypatch)
    waiting.say(claim(3), beat("a", epoch=3))
    waiting.script = {n: lambda: waiting.say(beat("a", epoch=3)) for n in range(1, 21)}
    assert waiting.wait() == 29, "20 beats a second apart, then more than 8 s of silence"
    assert {state for state, _ in waiting.heart.beats} == {State.STARTING}
    assert waiting.heart.beats[-1][1]["labels"] == {"standby_for": "d-a"}


def test_a_standby_goes_when_the_other_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(tmp_path, monkeypatch)
    waiting.say(claim(3), beat("a", epoch=3))
    waiting.script = {3: lambda: waiting.say(beat("a", State.LEFT))}
    assert waiting.wait() == 3


def test_a_log_that_was_away_tells_nothing_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(tmp_path, monkeypatch)
    waiting.say(claim(3), beat("a", epoch=3))

    def away(is_away: bool) -> None:
        waiting.log.away = is_away

    waiting.script = {2: lambda: away(True), 30: lambda: away(False)}
    assert waiting.wait() > 30 + 8


def test_a_standby_that_is_told_to_stop_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(tmp_path, monkeypatch)
    waiting.say(beat("a", epoch=3))
    waiting.script = {2: waiting.stop.request}
    assert waiting.wait() == 2


# Who was overtaken ------------------------------------------------------------------------------------------------


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    clock = Clock()
    monkeypatch.setattr("producers.dispatcher.time", clock)
    return Scene(tmp_path, clock)


def test_one_that_was_cut_off_ends_when_another_has_claimed_meanwhile(scene: Scene) -> None:
    """It would claim again and take over in its turn, and so on for ever."""
    scene.dispatcher.close()
    scene.ready()
    dispatching = Dispatching(make_daemon(scene.log, scene.settings), cast(Heart, scene.heart))
    assert dispatching.turn() == 0.0
    scene.log.away = True
    assert dispatching.turn() > 0
    scene.log.away = False
    scene.dispatcher = scene.start()
    with pytest.raises(Superseded, match="another one has claimed epoch 3"):
        dispatching.turn()
    scene.dispatcher.turn()
    assert max(r.epoch for r in said(scene.log, "requests") if isinstance(r, Claim)) == 3
    scene.dispatcher.close()


def test_one_that_was_cut_off_goes_on_where_nobody_else_has_claimed(scene: Scene) -> None:
    scene.dispatcher.close()
    scene.ready()
    dispatching = Dispatching(make_daemon(scene.log, scene.settings), cast(Heart, scene.heart))
    for _ in range(3):
        assert dispatching.turn() == 0.0
        scene.log.away = True
        assert dispatching.turn() > 0
        scene.log.away = False
        scene.log.fail_sends(1, present=True)
        assert dispatching.turn() > 0, "its claim was not acknowledged, and stands on the log"
    assert dispatching.turn() == 0.0
    dispatching.close()
