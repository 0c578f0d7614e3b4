"""The trainer on a log in memory, with the counting learner: plans, claims, re-execution, publishing, ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from infra.heartbeat import Heart
from infra.log import Place
from schemas.errors import LogGap, Superseded
from schemas.records import Claim, Plan, PlanDrop, Result
from support.loop import Clock, StubHeart, append, make_daemon, said
from support.points import Crash, ledger_of, train
from support.samples import claim, plan
from support.simulation import CountingLearner
from support.trainer_scene import Scene
from trainers.trainer import Trainer
from trainers.turns import Turns


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def made(**train: Any) -> Scene:
        scene = Scene(tmp_path, **train)
        monkeypatch.setattr(
            "trainers.trainer.make_learner",
            lambda daemon: CountingLearner(daemon, scene.disk, lambda plan: scene.executed.append(plan.step)),
        )
        return scene

    return made


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    return make()


def turns(trainer: Trainer, count: int = 4) -> None:
    for _ in range(count):
        trainer.turn()


def test_the_first_start_publishes_version_0_before_it_waits_for_anything(scene: Scene) -> None:
    trainer = scene.start()
    trainer.take_over()
    assert scene.versions() == [(1, 0)]
    assert [type(r) for r in said(scene.log, "steps")] == [Claim]
    trainer.close()


def test_plans_stand_before_they_are_executed_and_results_before_they_are_published(scene: Scene) -> None:
    seen: list[str] = []
    trainer = scene.start(seen.append)
    trainer.take_over()
    scene.outcomes(2)
    trainer.turn()
    assert seen[-8:] == [
        "before steps Plan", "after steps Plan", "before steps Result", "after steps Result", "before manifest",
        "after manifest", "before weights Announcement", "after weights Announcement",
    ]  # fmt: skip
    assert scene.executed == [0]
    trainer.close()


def test_a_step_waits_for_a_whole_batch(scene: Scene) -> None:
    trainer = scene.start()
    trainer.take_over()
    scene.outcomes(1)
    turns(trainer)
    assert ledger_of(scene.log).steps_planned == 0
    scene.outcomes(1, partition=1)
    turns(trainer)
    assert ledger_of(scene.log).steps_done == 1
    trainer.close()


def test_groups_beyond_the_bound_and_of_void_weights_are_set_aside(scene: Scene) -> None:
    scene.outcomes(2, partition=1)
    trainer = scene.start()
    trainer.take_over()
    for _ in range(3):
        scene.outcomes(2, version=(1, trainer.ledger.steps_done))
        turns(trainer, 6)
    assert trainer.ledger.steps_done == 4
    scene.outcomes(1, version=(1, 1))
    scene.outcomes(1, version=(9, 99))
    scene.outcomes(2, version=(1, 4))
    turns(trainer, 6)
    drops: list[PlanDrop] = ledger_of(scene.log).drops
    assert [(drop.reason, drop.age) for drop in drops] == [("stale", 3), ("void-version", -95)]
    assert ledger_of(scene.log).steps_done == 5
    trainer.close()


def test_a_successor_executes_again_what_is_beyond_the_checkpoint(scene: Scene) -> None:
    scene.outcomes(6)
    train(scene.start(), 3)
    before = [result.digest for result in ledger_of(scene.log).results]
    scene.disk.pop()  # the one of step 3, saved at the end
    scene.executed.clear()
    scene.outcomes(2, version=(1, 3))
    trainer = scene.start()
    trainer.take_over()
    assert scene.executed == [2]
    assert scene.versions() == [(1, 0), (1, 1), (1, 2), (1, 3)], "nothing is published again"
    turns(trainer)
    ledger = ledger_of(scene.log)
    assert [result.digest for result in ledger.results][:3] == before
    assert ledger.results[3].epoch == 2
    assert scene.versions()[-1] == (2, 4)
    trainer.close()


def test_a_successor_publishes_what_its_predecessor_could_not(scene: Scene) -> None:
    scene.outcomes(2)
    seen: list[str] = []

    def hook(name: str) -> None:
        seen.append(name)
        if seen.count("before manifest") == 2:
            raise Crash(name)

    with pytest.raises(Crash):
        train(scene.start(hook), 1)
    assert scene.versions() == [(1, 0)]
    assert ledger_of(scene.log).steps_done == 1
    train(scene.start(), 1)
    assert scene.versions() == [(1, 0), (2, 1)]


def test_a_superseded_trainer_ends_at_its_next_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.own_ledger.WATCH_S", 0.0)
    old = scene.start()
    old.take_over()
    new = scene.start()
    new.take_over()
    with pytest.raises(Superseded, match="superseded by epoch 2"):
        old.turn()
    new.turn()
    for trainer in (old, new):
        trainer.close()


def test_a_superseded_trainer_gets_no_plan_and_no_result_through(scene: Scene) -> None:
    old = scene.start()
    old.take_over()
    scene.outcomes(2)
    new = scene.start()
    new.take_over()
    with pytest.raises(Superseded):
        turns(old)
    assert scene.executed == []
    turns(new)
    assert [p.epoch for _, p in ledger_of(scene.log).plans] == [2]
    for trainer in (old, new):
        trainer.close()


def test_void_records_of_a_zombie_do_not_end_the_owner(scene: Scene) -> None:
    """A zombie's plan may stand between the owner's look and the owner's own plan."""
    zombie = scene.start()
    zombie.take_over()
    owner = scene.start()
    owner.take_over()
    scene.outcomes(2)
    append(scene.log, "steps", plan(epoch=1, nonce="zombie", step=0), claim(epoch=1, nonce="late"))
    turns(owner)
    assert ledger_of(scene.log).steps_done == 1
    for trainer in (zombie, owner):
        trainer.close()


def test_at_the_end_of_the_run_what_is_left_is_set_aside(make: Callable[..., Scene]) -> None:
    scene = make(steps=1)
    scene.outcomes(5)
    train(scene.start(), 1)
    ledger = ledger_of(scene.log)
    assert ledger.steps_done == 1
    assert [drop.reason for drop in ledger.drops] == ["run-ended"] * 3
    assert scene.versions() == [(1, 0), (1, 1)]


def test_the_last_version_is_published_whatever_the_rhythm(make: Callable[..., Scene]) -> None:
    scene = make(steps=3, publish_every=2)
    scene.outcomes(6)
    train(scene.start(), 3)
    assert scene.versions() == [(1, 0), (1, 2), (1, 3)]


def test_a_store_that_is_away_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = scene.start()
    trainer.take_over()
    waits: list[float] = []

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    monkeypatch.setattr(trainer._daemon.stop, "wait", wait)
    scene.outcomes(2)
    scene.store.fail_next(4)
    turns(trainer)
    assert waits and waits == sorted(waits)
    assert scene.versions() == [(1, 0), (1, 1)]
    assert scene.executed == [0]
    assert capsys.readouterr().out.count("the store is away") == 1
    trainer.close()


def test_a_broker_that_is_away_is_waited_for(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    daemon, heart = make_daemon(scene.log, scene.settings, store=scene.store), cast(Heart, StubHeart())
    training = Turns(lambda: Trainer(daemon, heart), heart)
    scene.log.away = True
    assert [training.turn() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    scene.log.away = False
    assert training.turn() == 0.0
    scene.outcomes(2)
    scene.log.fail_sends(1, present=True)
    rests = [training.turn() for _ in range(6)]
    assert [rest for rest in rests if rest] == [0.5]
    assert ledger_of(scene.log).steps_done == 1
    assert len([r for r in said(scene.log, "steps") if isinstance(r, Plan)]) == 1
    assert len([r for r in said(scene.log, "steps") if isinstance(r, Result)]) == 1
    assert capsys.readouterr().out.count("disturbed") == 2, "once for each trouble"
    training.end()
    training.close()


def test_removed_outcomes_end_the_process_with_their_number(scene: Scene) -> None:
    trainer = scene.start()
    trainer.take_over()
    scene.outcomes(3)
    scene.log.delete_before(Place("demo.main.samples", 0), 2)
    with pytest.raises(LogGap, match="2 records"):
        turns(trainer)
    trainer.close()


def test_a_starved_trainer_says_what_it_waits_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("trainers.trainer.time", clock)
    trainer = scene.start()
    trainer.take_over()
    scene.outcomes(1)
    for now_s in (1.0, 9.0, 11.0, 12.0, 25.0):
        clock.now_s = now_s
        trainer.turn()
    lines = [line for line in capsys.readouterr().out.splitlines() if "waiting" in line]
    assert ["waiting 11 s" in lines[0], "waiting 25 s" in lines[1], len(lines)] == [True, True, 2]
    assert "for outcomes of step 0: 1 of 2 groups there" in lines[0]
    trainer.close()


def test_a_step_s_figures_say_where_the_time_went(scene: Scene) -> None:
    scene.outcomes(2)
    trainer = scene.start()
    trainer.take_over()
    turns(trainer, 2)
    shares = {name: value for name, value in trainer._metrics.items() if name.startswith("time.")}
    assert set(shares) == {
        f"time.{cause}" for cause in ("gather", "step", "record", "publish", "checkpoint", "starved")
    }
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
    trainer.close()


def test_samples_are_read_and_successors_seen_while_a_step_runs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scene.start()
    trainer.take_over()
    execute = trainer._learner.execute
    seen: list[int] = []

    def slow(plan: Plan, outcomes: Any, meanwhile: Callable[[], None] | None = None) -> Any:
        scene.outcomes(2, version=(1, 0))
        assert meanwhile is not None
        for _ in range(3):
            meanwhile()
        seen.append(len(trainer._backlog.waiting()))
        return execute(plan, outcomes)

    monkeypatch.setattr(trainer._learner, "execute", slow)
    scene.outcomes(2)
    turns(trainer, 1)
    assert seen == [4], "two that are trained on, and two that came meanwhile"
    trainer.close()


def test_the_heads_after_all_of_it_are_whole(scene: Scene) -> None:
    scene.outcomes(4)
    train(scene.start(), 2)
    head = scene.heads().head
    assert head is not None and head.name == (1, 2)
    assert scene.store.size(head.key) is not None
