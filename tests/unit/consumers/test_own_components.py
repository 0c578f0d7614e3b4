"""Components of one's own work from the settings file alone: named by `package.module:name`, with their settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.processor import make_processor
from infra.config import load
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from schemas.codec import encode
from schemas.errors import SettingError
from schemas.records import KEPT, Outcome
from support.processor_scenes import Event, effective, filled
from support.samples import trajectory

OWN = "support.processor_components"
HEAD = """
[run]
name = "demo"
partitions = 1
[policies.main]
model = "model"
[policies.main.dispatch]
group_size = 4
[policies.main.process]
"""


def _processed(folder: Path, process: str, log: MemoryLog) -> list[Outcome]:
    """The effective outcomes after one turn of a processor with these lines under [policies.main.process]."""
    path = folder / "offsetrl.toml"
    path.write_text(HEAD + process, "utf-8")
    settings = load(path, environ={}).settings
    processor = make_processor(Daemon(settings, "main", "process", "", log, MemoryStore(), Stop()))
    try:
        assert processor.turn(0.0) == 0.0
    finally:
        processor.close()
    return effective(log)


def _log(*groups: list[float]) -> MemoryLog:
    return filled(
        [
            Event(1000, 0, encode(trajectory(
                group=f"g{n}", index=i, group_size=4, partition=0, reward=reward, seed=i, first_request_time_ms=1000,
                lifetime_ms=10**9,
            )))
            for n, rewards in enumerate(groups)
            for i, reward in enumerate(rewards)
        ]
    )  # fmt: skip


def _advantages(outcome: Outcome) -> list[float]:
    return [member.advantage for member in outcome.members]


def test_a_filter_of_ones_own(tmp_path: Path) -> None:
    lines = f"""
        filters = ["{OWN}:odd_seeds"]
        advantage = "dr-grpo"
        settings."{OWN}:odd_seeds".remainder = 0
    """
    (outcome,) = _processed(tmp_path, lines, _log([1.0, 0.0, 1.0, 0.0]))
    assert [m.disposition for m in outcome.members] == ["odd-seed", KEPT, "odd-seed", KEPT]
    assert _advantages(outcome) == [0.0, -0.5, 0.0, -0.5]


def test_a_group_filter_of_ones_own(tmp_path: Path) -> None:
    lines = f"""
        group_filters = ["zero-spread", "{OWN}:best_is_rare"]
        settings."{OWN}:best_is_rare".most = 1
    """
    outcomes = _processed(tmp_path, lines, _log([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.5, 0.0], [0.5] * 4))
    assert [outcome.disposition for outcome in outcomes] == ["too-many-best", KEPT, "zero-spread"]


def test_an_estimator_of_ones_own(tmp_path: Path) -> None:
    lines = f"""
        advantage = "{OWN}:above_best_other"
        settings."{OWN}:above_best_other".scale = 2.0
    """
    (outcome,) = _processed(tmp_path, lines, _log([1.0, 0.0, 0.5, 0.0]))
    assert _advantages(outcome) == [1.0, -2.0, -1.0, -2.0]


def test_shaping_of_ones_own_after_one_of_ours(tmp_path: Path) -> None:
    lines = f"""
        shaping = ["clip-reward", "{OWN}:bonus"]
        advantage = "{OWN}:raw"
        settings.clip-reward.high = 1.0
        settings."{OWN}:bonus".each = 0.25
    """
    (outcome,) = _processed(tmp_path, lines, _log([7.5, 0.0, 0.5, 0.0]))
    turns = sum(segment.role == "sampled" for segment in outcome.members[0].segments)
    assert turns > 0
    assert _advantages(outcome) == [1.0 + 0.25 * turns, 0.25 * turns, 0.5 + 0.25 * turns, 0.25 * turns]
    assert [member.reward for member in outcome.members] == [7.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (f'advantage = "{OWN}:above_best_othr"', "did you mean 'above_best_other'"),
        (f'shaping = ["{OWN}:bonus"]', "needs the setting 'each'"),
        (f'filters = ["{OWN}:odd_seeds"]\nsettings."{OWN}:odd_seeds".remaindr = 1', "did you mean 'remainder'"),
    ],
)
def test_a_slip_is_named_before_anything_runs(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        _processed(tmp_path, lines, _log())
