"""What `offsetrl run` and the demo watch: when a run is done, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import replay_command
from infra.demo.view import line
from infra.demo.watch import Watch
from infra.memory_log import MemoryLog
from infra.settings import Settings
from infra.train_settings import TrainTable
from schemas.errors import SettingError
from schemas.records import Address, Heartbeat, Plan
from schemas.rules.ending import StopAt
from support.loop import Clock, append, make_log, make_settings
from support.samples import claim, heartbeat, plan, result

OWNER: dict[str, Any] = {"epoch": 1, "nonce": "n"}


class Scene:
    """A watched log."""

    def __init__(self, folder: Path, **train: Any) -> None:
        self.settings: Settings = make_settings(folder, train=train)
        self.clock = Clock()
        self.log: MemoryLog = make_log(self.settings, clock_ms=self.clock.ms)
        self.watch = Watch(self.log, self.settings, 0.0)
        self._steps = 0
        append(self.log, "steps", claim(**OWNER))

    def plan(self, *, num_tokens: int = 0, samples: bool = True) -> Plan:
        named = (Address(0, self._steps, self._steps, 1),) if samples else ()
        record = plan(step=self._steps, samples=named, drops=(), num_tokens=num_tokens, **OWNER)
        append(self.log, "steps", record)
        return record

    def step(self, num_tokens: int = 1000) -> None:
        self.plan(num_tokens=num_tokens)
        self._steps += 1
        append(self.log, "steps", result(step=self._steps - 1, version=self._steps, **OWNER))

    @property
    def done(self) -> bool:
        self.watch.poll(0.0)
        return self.watch.done

    @property
    def course(self) -> str:
        self.watch.poll(0.0)
        return line(self.watch.policies["main"]).split(" · ")[0]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def start(**train: Any) -> Scene:
        made.append(Scene(tmp_path, **train))
        return made[-1]

    yield start
    for scene in made:
        scene.watch.close()


def test_a_run_of_steps_is_done_with_the_last_result(make: Callable[..., Scene]) -> None:
    scene = make(steps=2)
    scene.step()
    assert not scene.done and scene.course == "main: step 1/2"
    scene.plan()
    assert not scene.done, "planned, and not done"
    append(scene.log, "steps", result(step=1, version=2, **OWNER))
    assert scene.done and scene.watch.ending == "all steps trained"


def test_a_run_of_tokens_is_done_with_the_result_of_the_step_that_reaches_them(make: Callable[..., Scene]) -> None:
    scene = make(steps=0, tokens=2500)
    scene.step()
    scene.step()
    assert not scene.done and scene.course == "main: step 2, 2,000/2,500 tokens"
    scene.plan(num_tokens=1000)
    assert not scene.done, "planned, and not done"
    append(scene.log, "steps", result(step=2, version=3, **OWNER))
    assert scene.done and scene.watch.ending == "all tokens trained"
    assert scene.course == "main: step 3, 3,000/2,500 tokens"


def test_a_starved_run_of_hours_is_done_with_the_plan_that_tells_the_time(make: Callable[..., Scene]) -> None:
    scene = make(steps=0, hours=2.0)
    assert not scene.done and scene.course == "main: step 0, 0.00/2 h"
    scene.clock.now_s = 5400.0
    beat: Heartbeat = heartbeat()
    append(scene.log, "control", beat)
    assert not scene.done and scene.course == "main: step 0, 1.50/2 h", "time goes on with every record"
    scene.clock.now_s = 7200.0
    append(scene.log, "control", beat)
    assert not scene.done, "only plans end a run"
    scene.plan(samples=False)
    assert scene.done and scene.watch.ending == "the time is over"


def test_a_run_without_any_limit_is_never_done(make: Callable[..., Scene]) -> None:
    scene = make(steps=0)
    scene.step()
    assert not scene.done and scene.course == "main: step 1" and scene.watch.ending == ""


# Settings ------------------------------------------------------------------------------------------------------------


def test_limits_are_none_or_above_0() -> None:
    assert TrainTable().stop_at == StopAt(0, 0, 0.0)
    assert TrainTable(steps=5, tokens=10**9, hours=7.5).stop_at == StopAt(5, 10**9, 7.5)
    wrong: list[dict[str, Any]] = [{"tokens": -1}, {"hours": -0.5}, {"hours": float("inf")}, {"hours": float("nan")}]
    for limits in wrong:
        with pytest.raises(ValueError, match=r"greater than or equal to 0|finite number"):
            TrainTable(**limits)


def test_a_schedule_needs_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="tokens and hours give no number of steps"):
        TrainTable(schedule="cosine", tokens=1000, hours=1.0)
    assert TrainTable(schedule="cosine", tokens=1000, decay_steps=9).decay_steps == 9


def test_a_replay_ends_by_its_steps_alone(make: Callable[..., Scene]) -> None:
    class Child:
        def start(self, role: str, overrides: list[str]) -> str:
            self.given = overrides
            return role

        def check(self, name: str) -> None:
            raise SettingError("seen enough")

    scene, child = make(steps=0, tokens=5, hours=1.0), Child()
    with pytest.raises(SettingError, match="seen enough"):
        replay_command._train(scene.log, scene.settings, "main", 3, child, ["run.name=x"])  # type: ignore[arg-type]
    at = "policies.main.train"
    assert child.given == ["run.name=x", f"{at}.steps=3", f"{at}.tokens=0", f"{at}.hours=0.0"]
