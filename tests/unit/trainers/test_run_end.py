"""A trainer at the end of its run: by tokens or hours, well fed or starved, after crashes, and with a limit that was raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Superseded
from schemas.records import Plan
from schemas.rules.ending import StopAt
from support.loop import Clock, append, said
from support.points import Crash, crash_at, ledger_of, train
from support.samples import plan
from support.simulation import CountingLearner
from support.trainer_scene import TOKENS, Scene
from trainers.batching import num_trainable, rows_of_step
from trainers.samples_reader import SamplesReader
from trainers.trainer import Trainer

STEP_TOKENS = 2 * TOKENS
HALF_HOUR_S = 1800.0
RARELY = {"max_staleness": 8, "publish_every": 9, "checkpoint_every": 100}
"""Only an end publishes and saves."""


class Timed:
    """Scenes whose log and trainers go by one clock, or by two that differ; each step takes half an hour."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self.clock, self.set_back_s = folder, patch, Clock(), 0.0
        patch.setattr("trainers.own_ledger.time", self.clock)
        patch.setattr("trainers.trainer.time", self.clock)
        read = SamplesReader.read
        patch.setattr(SamplesReader, "read", lambda reader, timeout_s: read(reader, 0.0))

    def __call__(self, **train: Any) -> Scene:
        scene = Scene(self._folder, lambda: self.clock.ms() - int(self.set_back_s * 1000), **{**RARELY, **train})

        def execute(plan: Plan) -> None:
            scene.executed.append(plan.step)
            self.clock.sleep(HALF_HOUR_S)

        self._patch.setattr(
            "trainers.trainer.make_learner", lambda daemon: CountingLearner(daemon, scene.disk, execute)
        )
        return scene


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(tmp_path, monkeypatch)


def go(trainer: Trainer, turns: int = 8) -> None:
    """Take over, some turns, and an orderly end."""
    try:
        trainer.take_over()
        for _ in range(turns):
            trainer.turn()
        trainer.end()
    finally:
        trainer.close()


def plans(scene: Scene) -> list[Plan]:
    return [record for record in said(scene.log, "steps") if isinstance(record, Plan)]


def raised(scene: Scene, **limits: Any) -> None:
    table = scene.settings.policies["main"]
    train = table.train.model_copy(update=limits)
    scene.settings = scene.settings.model_copy(update={"policies": {"main": table.model_copy(update={"train": train})}})


def why(scene: Scene) -> str:
    return ledger_of(scene.log).ended(scene.settings.policies["main"].train.stop_at)


def test_a_plan_says_how_many_tokens_will_be_trained_on(make: Timed) -> None:
    scene = make(steps=1)
    scene.outcomes(2)
    trainer = scene.start()
    trainer.take_over()
    trainer._samples.read(0.0)
    held = [held.outcome for held in trainer._backlog._held.values()]
    rows = rows_of_step(held)
    assert sum(map(num_trainable, held)) == sum(row.num_trainable for row in rows) == STEP_TOKENS
    trainer.turn()
    assert [p.num_tokens for p in plans(scene)] == [STEP_TOKENS] == [ledger_of(scene.log).tokens_planned]
    trainer.close()


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (STEP_TOKENS, 1), (STEP_TOKENS + 1, 2), (3 * STEP_TOKENS, 3)])
def test_the_step_that_reaches_the_tokens_is_the_last(make: Timed, tokens: int, steps: int) -> None:
    scene = make(steps=0, tokens=tokens)
    scene.outcomes(9)
    go(scene.start())
    ledger = ledger_of(scene.log)
    assert (why(scene), ledger.steps_done) == ("tokens", steps)
    assert [drop.reason for drop in ledger.drops] == ["run-ended"] * (9 - 2 * steps)
    assert scene.versions() == [(1, 0), (1, steps)], "published, whatever the rhythm"
    assert scene.disk[-1][0] == steps, "and saved"


def test_when_the_hours_are_over_no_further_step_begins(make: Timed) -> None:
    scene = make(steps=0, hours=0.75)
    scene.outcomes(9)
    go(scene.start())
    ledger = ledger_of(scene.log)
    assert (why(scene), ledger.steps_done) == ("hours", 2), "the second began in time, and is finished"
    kinds = [(bool(p.samples), bool(p.drops)) for p in plans(scene)]
    assert kinds == [(True, False), (True, False), (False, False), (False, True)]
    assert len(ledger.drops) == 5 and ledger.void == 0
    assert scene.versions() == [(1, 0), (1, 2)] and scene.disk[-1][0] == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_a_starved_trainer_ends_its_run_with_one_plan_of_nothing(make: Timed, steps: int) -> None:
    scene = make(steps=0, hours=1.0)
    trainer = scene.start()
    trainer.take_over()
    scene.outcomes(2 * steps + 1)
    for _ in range(9):
        trainer.turn()
    assert len(plans(scene)) == steps and not why(scene)
    make.clock.now_s = 3600.0
    for _ in range(4):
        trainer.turn()
    assert why(scene) == "hours"
    assert [len(p.samples) + len(p.drops) for p in plans(scene)] == [2] * steps + [0, 1]
    assert scene.versions() == ([(1, 0), (1, 1)] if steps else [(1, 0)]), "before it is told to stop"
    trainer.close()


def test_hours_are_those_of_the_log(make: Timed) -> None:
    """The log's clock is set back by half an hour: the trainer believes that the time is over, and is told that it is not."""
    scene = make(steps=0, hours=1.0)
    trainer = scene.start()
    trainer.take_over()
    make.set_back_s = HALF_HOUR_S
    make.clock.now_s = 3600.0
    for _ in range(5):
        trainer.turn()
    assert [len(p.samples) for p in plans(scene)] == [0] and not why(scene), "one question, and no second"
    scene.outcomes(2)
    trainer.turn()
    assert ledger_of(scene.log).steps_done == 1, "it goes on"
    trainer.turn()
    assert why(scene) == "hours" and make.clock.now_s == 3600.0 + HALF_HOUR_S
    trainer.close()


def test_where_the_trainers_machine_thinks_it_is_does_not_matter(make: Timed) -> None:
    scene = make(steps=0, hours=1.0)
    make.set_back_s = 5e8
    trainer = scene.start()
    trainer.take_over()
    make.clock.now_s = 3599.0
    trainer.turn()
    assert plans(scene) == []
    make.clock.now_s = 3600.0
    trainer.turn()
    assert why(scene) == "hours"
    trainer.close()


@pytest.mark.parametrize("limits", [{"tokens": 2 * STEP_TOKENS}, {"hours": 1.0}], ids=str)
def test_what_has_ended_stays_ended_until_its_limit_is_raised(make: Timed, limits: dict[str, Any]) -> None:
    scene = make(steps=0, **limits)
    scene.outcomes(5)
    go(scene.start())
    scene.executed.clear()
    scene.outcomes(4)
    go(scene.start())
    ledger = ledger_of(scene.log)
    assert (ledger.steps_done, scene.executed, len(ledger.drops)) == (2, [], 5)
    assert scene.versions() == [(1, 0), (1, 2)], "nothing is published again"
    raised(scene, **{name: 2 * limit for name, limit in limits.items()})
    scene.outcomes(9, version=(1, 2))
    go(scene.start())
    ledger = ledger_of(scene.log)
    assert (why(scene), ledger.steps_done, scene.versions()[-1]) == (next(iter(limits)), 4, (3, 4))


def test_a_zombie_tells_no_time(make: Timed) -> None:
    scene = make(steps=0, hours=1.0)
    old, new = scene.start(), scene.start()
    old.take_over()
    new.take_over()
    make.clock.now_s = 3600.0
    with pytest.raises(Superseded):
        old.turn()
    assert not why(scene)
    append(scene.log, "steps", plan(epoch=1, nonce="zombie", step=0, samples=(), drops=()))
    assert not why(scene)
    new.turn()
    assert why(scene) == "hours"
    for trainer in (old, new):
        trainer.close()


@pytest.mark.parametrize("limits", [{"tokens": 2 * STEP_TOKENS}, {"hours": 1.0}], ids=str)
def test_a_crash_at_any_point_gives_an_end_that_is_whole(make: Timed, limits: dict[str, Any]) -> None:
    """By tokens it is the same end. Of hours, a crash costs time: a step that is taken again may be the last."""
    ends = set()
    for number in range(200):
        make.clock.now_s = 0.0
        scene = make(steps=0, **limits)
        scene.outcomes(7)
        try:
            go(scene.start(crash_at(number)))
            break
        except Crash:
            go(scene.start())
        finally:
            ledger = ledger_of(scene.log)
            last = scene.versions()[-1][1]
            assert why(scene) and last == ledger.steps_done == ledger.steps_planned == scene.disk[-1][0], number
            assert len(ledger.drops) == 7 - 2 * last
            ends.add((last, ledger.results[-1].digest if last else ""))
    else:
        raise AssertionError("200 points are not enough")
    assert number > 20
    assert {last for last, _ in ends} == ({2} if "tokens" in limits else {1, 2})
    assert len({digest for last, digest in ends if last == 2}) == 1, "the same steps give the same weights"


def test_a_step_that_was_left_at_the_end_is_not_set_aside(make: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop in the middle of the last step: its outcomes wait for the next start and are named by no further plan."""
    scene = make(steps=1)
    scene.outcomes(3)
    trainer = scene.start()
    trainer.take_over()
    with monkeypatch.context() as patch:
        patch.setattr(trainer._learner, "execute", lambda *given: None)
        trainer.turn()
        trainer.turn()
        trainer.end()
    trainer.close()
    assert (ledger_of(scene.log).steps_done, len(plans(scene))) == (0, 1)
    train(scene.start(), 1)
    ledger = ledger_of(scene.log)
    assert (ledger.steps_done, len(ledger.drops), ledger.void) == (1, 1, 0)


def test_of_several_limits_the_first_one_counts(make: Timed) -> None:
    scene = make(steps=3, tokens=10**9, hours=0.75)
    scene.outcomes(9)
    go(scene.start())
    assert (why(scene), ledger_of(scene.log).steps_done) == ("hours", 2)
    assert ledger_of(scene.log).ended(StopAt(steps=2, tokens=1, hours=0.1)) == "steps"
