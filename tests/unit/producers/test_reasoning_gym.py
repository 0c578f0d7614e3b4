"""reasoning-gym: its scorers are not trusted, and what is known of their holes is still so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from producers.environments import check_environment, make_environment
from producers.environments.reasoning_gym_tasks import HOLES, between, reasoning_gym_tasks, score
from schemas.errors import SettingError
from schemas.records import Status

SLOW = {
    "knight_swap",
    "quantum_lock",
    "zebra_puzzles",
    "intermediate_integration",
    "puzzle24",
    "acre",
    "arc_agi",
    "composite",
}
"""Tasks whose entries take long to make; left out of the scan of all tasks."""


def _scored(value: Any, strict: bool = False) -> tuple[Status, float | None]:
    verdict = score(lambda answer, entry: value, {}, "x", strict=strict, truncated=False)
    return verdict.status, verdict.reward


def test_scores_are_clamped_and_the_raw_one_is_kept() -> None:
    assert [_scored(value) for value in (1.5, -0.5, 0.25, 1)] == [(Status.OK, r) for r in (1.0, 0.0, 0.25, 1.0)]
    assert dict(score(lambda a, e: 1.5, {}, "x", strict=False, truncated=False).parts) == {"raw": 1.5}


def test_strict_pays_only_for_what_is_right() -> None:
    assert [_scored(value, strict=True)[1] for value in (0.98, 0.99, 1.0, 2.0)] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_what_is_no_finite_number_is_a_grader_error(value: Any) -> None:
    assert _scored(value) == (Status.GRADER_ERROR, None)


def test_a_scorer_that_raises_gives_no_reward() -> None:
    environment = make_environment("reasoning-gym", {"task": "prime_factorization"}, 0)
    session = environment.open(0, "", 0)
    session.act("seven times eleven", truncated=False)
    verdict = session.verdict()
    assert (verdict.status, verdict.reward) == (Status.GRADER_ERROR, None)
    assert "ValueError" in verdict.error


def test_no_other_task_pays_in_full_for_garbage() -> None:
    from reasoning_gym.factory import DATASETS

    paid = set()
    for name in sorted(set(DATASETS) - SLOW):
        environment = reasoning_gym_tasks(1, task=name, allow_holes=True, size=50)
        for item in range(4 if name in HOLES else 1):
            session = environment.open(item, "", 0)
            session.act("zzz", truncated=False)
            if (session.verdict().reward or 0.0) > 0.5:
                paid.add(name)
    assert paid == set(HOLES)


def test_tasks_with_holes_are_refused() -> None:
    with pytest.raises(SettingError, match="allow_holes"):
        make_environment("reasoning-gym", {"task": "game_of_life_halting"}, 0)


def test_the_right_answer_earns_one_and_two_processes_see_the_same_item() -> None:
    settings = {"task": "simple_equations", "template": "{equation}:", "size": 30, "strict": True}
    here, elsewhere = (check_environment("reasoning-gym", settings, 11) for _ in range(2))
    assert here.num_items == 30
    for item in range(30):
        session = here.open(item, here.payload(item), 1)
        assert session.observe() == elsewhere.open(item, here.payload(item), 2).observe()
        assert session.observe().text.endswith(":")
        session.act(f" {session.entry['answer']}\n", truncated=True)  # type: ignore[attr-defined]
        assert session.done
        assert (session.verdict().status, session.verdict().reward) == (Status.TRUNCATED, 1.0)
    assert len({here.open(item, "", 0).observe().text for item in range(30)}) > 25


def test_several_tasks_take_turns() -> None:
    settings = {"tasks": {"gcd": {"max_value": 20}, "lcm": {}}, "size": 5}
    environment = make_environment("reasoning-gym", settings, 0)
    assert environment.num_items == 10
    names = [environment.open(i, "", 0).entry["metadata"]["source_dataset"] for i in range(4)]  # type: ignore[attr-defined]
    assert names == ["gcd", "lcm", "gcd", "lcm"]


def test_a_missing_tag_is_an_invalid_action_that_earns_nothing() -> None:
    environment = make_environment("reasoning-gym", {"task": "gcd", "tag": "answer"}, 0)
    without, within = environment.open(0, "", 0), environment.open(0, "", 0)
    without.act("I think 4", truncated=False)
    within.act(f"I think <answer>{within.entry['answer']}</answer>", truncated=False)  # type: ignore[attr-defined]
    assert (without.verdict().status, without.verdict().reward) == (Status.INVALID_ACTION, 0.0)
    assert (within.verdict().status, within.verdict().reward) == (Status.OK, 1.0)
    assert between("</answer><answer>", "answer") is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either 'task'"),
        ({"task": "gcd", "tasks": {"lcm": {}}}, "either 'task'"),
        ({"tasks": {"lcm": {}}, "config": {"size": 3}}, "not in 'config'"),
        ({"task": "gdc"}, "did you mean 'gcd'"),
        ({"task": "gcd", "config": {"max_valu": 3}}, "does not take the config"),
        ({"task": "gcd", "size": 0}, "at least 1"),
        ({"task": "gcd", "template": "{questoin}"}, "did you mean 'question'"),
        ({"task": "gcd", "template": "{question"}, "cannot fill the template"),
        ({"task": "gcd", "strikt": True}, "did you mean 'strict'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check_environment("reasoning-gym", settings, 0)
