"""Figures of a step: by task, by age, in a file of JSON lines and in trackers; and where they may not be written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infra.train_settings import TrainTable
from schemas.errors import SettingError
from schemas.records import VersionRun
from support.outcomes import make_outcome
from support.training import make_member, make_stepper, random_rows
from trainers import acceleration
from trainers.batching import rows_of_step
from trainers.health import Health
from trainers.metrics import MAX_TASKS, facts_of

pytestmark = pytest.mark.model


class StubTracker:
    """Keeps what it is given."""

    requires_logging_directory = True
    opened: ClassVar[list[StubTracker]] = []

    def __init__(self, run_name: str, logging_dir: str) -> None:
        self.run_name, self.logging_dir = run_name, logging_dir
        self.said: list[Any] = []

    def start(self) -> None:
        StubTracker.opened.append(self)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self.said.append((step, dict(values)))

    def finish(self) -> None:
        self.said.append("finished")


def test_each_step_is_a_line_and_goes_to_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", StubTracker)
    monkeypatch.setattr(acceleration, "get_available_trackers", lambda: ["wandb"])
    health = Health(["jsonl", "wandb"], "demo", "main", tmp_path / "health")
    health.log(3, {"loss": 0.5})
    health.log(4, {"loss": math.pi})
    health.close()
    lines = [json.loads(line) for line in (tmp_path / "health" / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(3, 0.5), (4, math.pi)]
    tracker = StubTracker.opened.pop()
    assert (tracker.run_name, tracker.logging_dir) == ("demo.main", str(tmp_path / "health"))
    assert tracker.said == [(3, {"loss": 0.5}), (4, {"loss": math.pi}), "finished"]


def test_tensorboard_s_own_reader_finds_every_figure_of_a_default_run(tmp_path: Path) -> None:
    health = Health(TrainTable().trackers, "demo", "main", tmp_path)
    health.log(3, {"loss": 0.5, "reward.sums": 0.25})
    health.log(4, {"loss": math.pi, "reward.sums": math.nan})
    health.close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2
    found = EventAccumulator(str(tmp_path / "demo.main")).Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "reward.sums"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 0.5), (4, pytest.approx(math.pi))]
    assert [event.value for event in found.Scalars("reward.sums")] == pytest.approx([0.25, math.nan], nan_ok=True)


def test_a_tracker_that_is_not_there_is_named_at_the_start_but_tensorboard_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceleration, "get_available_trackers", lambda: [])
    Health(["jsonl", "tensorboard"], "demo", "main", tmp_path).close()
    assert "'tensorboard' is not installed here: pip install tensorboard" in capsys.readouterr().out
    with pytest.raises(SettingError, match="'wandb' is not installed here: pip install wandb"):
        Health(["wandb"], "demo", "main", tmp_path)
    with pytest.raises(SettingError, match="'wandbb' is not known; did you mean 'wandb'"):
        Health(["wandbb"], "demo", "main", tmp_path)


def test_a_disk_that_is_full_costs_the_lines_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "health").write_text("a file where the folder should be")
    health = Health(["jsonl", "tensorboard"], "demo", "main", tmp_path / "health")
    assert "a tracker is left out" in capsys.readouterr().out
    for step in range(3):
        health.log(step, {})
    health.close()
    assert capsys.readouterr().out.count("figures not written") == 1


def test_a_tracker_that_cannot_write_takes_neither_the_lines_nor_the_training_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", StubTracker)
    monkeypatch.setattr(acceleration, "get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(StubTracker, "log", lambda *_, **__: (tmp_path / "no folder" / "file").read_text())
    health = Health(["jsonl", "wandb"], "demo", "main", tmp_path)
    for step in range(3):
        health.log(step, {})
    health.close()
    assert capsys.readouterr().out.count("figures not written") == 1
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


def test_rewards_by_task_and_rows_by_age() -> None:
    rows = [
        replace(row, task=task, reward=reward, age=age)
        for row, (task, reward, age) in zip(
            random_rows(4), [("b", 1.0, 0), ("a", 0.0, 2), ("a", 0.5, 2), ("", 9.0, -1)], strict=True
        )
    ]
    assert facts_of(rows) == {"reward.a": 0.25, "reward.b": 1.0, "rows.age-0": 0.25, "rows.age-2": 0.5}


def test_tasks_beyond_the_limit_are_put_together() -> None:
    row = random_rows(1)[0]
    rows = [replace(row, task=f"t{i:03}", reward=float(i)) for i in range(MAX_TASKS + 3)]
    found = facts_of(rows)
    assert len(found) == MAX_TASKS + 1
    assert found["reward.others"] == MAX_TASKS + 1


def test_mismatch_and_truncation_are_told_apart_by_age_whatever_the_micro_batches() -> None:
    rows = [
        replace(row, age=i % 2, behaviour_T=row.behaviour_T - (4.0 if i % 2 else 0.0) * row.mask_T)
        for i, row in enumerate(random_rows(8))
    ]
    found = []
    for budget in (10_000, 20):
        figures = make_stepper(micro_batch_tokens=budget).execute(rows, step=0, seed=0).as_dict()
        found.append({name: value for name, value in figures.items() if ".age-" in name})
        tokens = [sum(row.num_trainable for row in rows if row.age == age) for age in (0, 1)]
        by_age = [figures[f"lag_kl.age-{age}"] * tokens[age] for age in (0, 1)]
        assert sum(by_age) / sum(tokens) == pytest.approx(figures["lag_kl"], rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0]["truncated.age-1"] == 1.0 > found[0]["truncated.age-0"]


def test_a_row_s_age_is_that_of_its_oldest_token_and_rows_of_other_runs_have_none() -> None:
    member = make_member([3, 4, 5], [0, 1, 1], versions=(VersionRun(1, 3, 1), VersionRun(1, 4, 1)))
    outcome = replace(make_outcome(closing_offset=2, previous=-1), members=(member,), task="sums")
    (row,) = rows_of_step([outcome], version=6)
    assert (row.age, row.task, row.group, row.group_mean) == (3, "sums", outcome.group, 0.5)
    (other,) = rows_of_step([replace(outcome, source_run="another")], version=6)
    assert other.age == -1
