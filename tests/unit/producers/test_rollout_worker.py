"""The rollout worker on a log in memory, turn by turn, with the scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.weights.follower import FetchedWeights
from producers.inbox import find_inbox
from schemas.records import State, Status, Version
from support.loop import append
from support.rollout_scene import Scene, install
from support.samples import heartbeat


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    clock = install(monkeypatch)
    scenes: list[Scene] = []

    def made(**tables: Any) -> Scene:
        scenes.append(Scene(tmp_path, clock, **tables))
        return scenes[-1]

    yield made
    for scene in scenes:
        scene.worker.close()


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    return make()


def test_requests_become_trajectories(scene: Scene) -> None:
    scene.clock.now_s = 7.0
    asked_ms = scene.clock.ms()
    scene.ask(0)
    scene.ask(1, attempt=1, first_request_time_ms=asked_ms - 2500)
    scene.turns()
    one, two = sorted(scene.published(), key=lambda t: t.index)
    assert (one.group, one.partition, one.session, one.worker, one.model) == ("g00000000", 0, "s1", "w0", "digest-0")
    assert one.first_request_time_ms == asked_ms, "the request's own append time"
    assert two.first_request_time_ms == asked_ms - 2500, "a re-issue carries the first one's"
    assert one.reward is not None and one.timings["episode_s"] > 0


def test_requests_that_are_void_or_for_others_are_passed_over(scene: Scene) -> None:
    scene.ask(0, session="s2")
    scene.claim(2, "b")
    scene.ask(1)
    scene.ask(2, epoch=2, nonce="b")
    scene.turns()
    assert [t.index for t in scene.published()] == [2]
    assert scene.heart.beats[-1][1]["void_requests"] == 1


def test_a_request_proves_a_claim_that_was_not_read(scene: Scene) -> None:
    scene.ask(0, epoch=5, nonce="e")
    scene.ask(1)
    scene.turns()
    assert [t.index for t in scene.published()] == [0]


def test_an_attempt_that_runs_already_is_not_begun_again(scene: Scene) -> None:
    for _ in range(3):
        scene.ask(0)
    scene.turns()
    assert [t.status in (Status.OK, Status.TRUNCATED) for t in scene.published()] == [True]


def test_requests_wait_for_weights_that_are_new_enough(scene: Scene) -> None:
    scene.ask(0, min_version=1)
    scene.ask(1)
    scene.turns()
    assert [t.index for t in scene.published()] == [1]
    scene.weights.ready = FetchedWeights(Version(1, 1), scene.folder, "digest-1")
    scene.turns()
    second = scene.published()[1]
    assert (second.index, second.model, second.versions[0][:2]) == (0, "digest-1", (1, 1))


def test_a_request_that_waited_past_its_lifetime_is_let_go(scene: Scene) -> None:
    scene.ask(0, min_version=9)
    scene.turns(2)
    scene.clock.now_s += 6.0
    scene.turns(1)
    assert scene.heart.beats[-1][1]["waiting_requests"] == 0
    assert scene.heart.beats[-1][1]["expired_requests"] == 1


def test_weights_are_swapped_in_flight(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.worker._engine, "_answer", lambda request: [0, 0, 0])
    scene.ask(0)
    scene.turns(1)
    scene.weights.ready = FetchedWeights(Version(2, 4), scene.folder, "digest-4")
    scene.turns()
    (found,) = scene.published()
    assert [run[:2] for run in found.versions] == [(1, 0), (2, 4)]
    assert found.old_kv


def test_a_broken_environment_costs_one_trajectory_and_not_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scene.worker._episodes._environment.open

    def opens(item: int, payload: str, seed: int) -> Any:
        if item == 13:
            raise RuntimeError("no sandbox")
        return real(item, payload, seed)

    monkeypatch.setattr(scene.worker._episodes._environment, "open", opens)
    scene.ask(0, item=13)
    scene.ask(1)
    scene.turns()
    broken, fine = sorted(scene.published(), key=lambda t: t.index)
    assert (broken.status, broken.reward) == (Status.ENV_ERROR, None)
    assert "no sandbox" in broken.error
    assert fine.reward is not None


def test_an_episode_that_takes_too_long_has_a_status_and_no_reward(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(rollout={"episode_timeout_s": 3.0})
    monkeypatch.setattr(scene.worker._engine, "step", lambda: [])
    scene.ask(0)
    scene.turns(2)
    scene.clock.now_s += 3.0
    scene.turns(2)
    (found,) = scene.published()
    assert (found.status, found.reward) == (Status.TIMEOUT, None)


def test_a_broker_that_is_away_holds_nothing_up(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.ask(0)
    scene.ask(1)
    scene.turns(1)
    scene.log.away = True
    scene.turns(20)
    assert scene.heart.beats[-1][1]["unacknowledged"] == 2, "episodes went on, and what they gave is kept"
    scene.log.away = False
    scene.ask(2)
    scene.clock.now_s += 10.0
    scene.turns(10)
    assert sorted(t.index for t in scene.published()) == [0, 1, 2]
    assert capsys.readouterr().out.count("requests cannot be read") == 1


def test_no_new_episodes_while_the_log_takes_nothing(scene: Scene) -> None:
    for n in range(60):
        scene.ask(n, group_size=100)
    scene.log.stall()
    scene.turns(100)
    metrics = scene.heart.beats[-1][1]
    assert 24 < metrics["unacknowledged"] <= 24 + 6, "four times the concurrency, and what ran"
    assert metrics["waiting_requests"] == 60 - metrics["unacknowledged"]
    scene.log.resume()
    scene.turns(60)
    assert len(scene.published()) == 60


def test_draining_finishes_what_runs_and_leaves_the_rest(make: Callable[..., Scene]) -> None:
    scene = make(rollout={"concurrency": 1})
    scene.ask(0)
    scene.ask(1)
    scene.turns(1)
    scene.worker.hand_over()
    assert [t.index for t in scene.published()] == [0]
    assert scene.heart.beats[-1][0] is State.DRAINING


def test_a_session_takes_the_inbox_that_is_used_least(scene: Scene) -> None:
    append(
        scene.log, "control",
        heartbeat(name="w1", inbox=0), heartbeat(name="w2", inbox=1), heartbeat(name="w3", inbox=1),
        heartbeat(name="w4", inbox=2, state=State.LEFT), heartbeat(name="w0", inbox=2),
    )  # fmt: skip
    inbox = find_inbox(scene.daemon, "s9")
    assert inbox is not None and inbox.number == 2
    inbox.close()


def test_a_session_waits_for_the_broker_before_it_takes_an_inbox(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        scene.log.away = len(waits) < 4
        return False

    monkeypatch.setattr(scene.daemon.stop, "wait", wait)
    scene.log.away = True
    inbox = find_inbox(scene.daemon, "s9")
    assert inbox is not None
    assert waits == [0.25, 0.5, 1.0, 2.0]
    inbox.close()
    scene.daemon.stop.request()
    assert find_inbox(scene.daemon, "s9") is None


def test_heartbeats_say_what_the_worker_can_do(make: Callable[..., Scene]) -> None:
    scene = make(rollout={"tags": ["sandbox", "gpu"]})
    scene.ask(0)
    scene.turns()
    state, beat = scene.heart.beats[-1]
    assert (state, beat["labels"]["tags"], beat["capacity"]) == (State.SERVING, "sandbox,gpu", 6)
    assert (beat["published"], beat["partials"], beat["stuck_calls"]) == (1.0, 0.0, 0.0)
    first = next(fields for _, fields in scene.heart.beats if fields["tokens_per_s"])
    assert first["tokens_per_s"] == scene.worker._episodes.num_sampled / 2.0
