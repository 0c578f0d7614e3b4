"""Recipes: names, settings and sizes are checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from consumers.components import ADVANTAGES, FILTERS, GROUP_FILTERS, SHAPING, make_recipe
from consumers.group_rewards import GroupRewards
from schemas.components import load
from schemas.errors import SettingError
from support.samples import trajectory


@pytest.mark.parametrize("table", [SHAPING, FILTERS, GROUP_FILTERS, ADVANTAGES])
def test_every_name_in_a_table_is_there(table: dict[str, str]) -> None:
    for name in table:
        assert load("component", name, table).__name__ == name.replace("-", "_")


def test_settings_are_bound_by_component() -> None:
    recipe = make_recipe(
        filters=["max-tokens", "truncated"],
        group_filters=["zero-spread"],
        settings={"max-tokens": {"limit": 2}, "zero-spread": {"tol": 0.5}, "grpo": {"eps": 1.0}},
        group_size=4,
    )
    assert recipe.filters[0](trajectory()) == "max-tokens"
    assert recipe.group_filters[0](GroupRewards.of([0.0, 0.4])) == "zero-spread"
    assert recipe.advantage(GroupRewards.of([0.0, 1.0]))[1] == pytest.approx(0.5 / (0.5**0.5 + 1))


def test_one_of_your_own_is_found_by_its_path() -> None:
    recipe = make_recipe(advantage="support.processor_components:raw", group_size=1)
    assert recipe.advantage(GroupRewards.of([0.5])).tolist() == [0.5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantage": "gpro"}, "did you mean 'grpo'"),
        ({"filters": ["max-token"]}, "did you mean 'max-tokens'"),
        ({"group_filters": ["zero_spread"]}, "did you mean 'zero-spread'"),
        ({"advantage": "support.none_here:f"}, "cannot import"),
        ({"settings": {"rloo": {}}}, "not used here"),
        ({"settings": {"grpo": {"epsilon": 1.0}}}, "did you mean 'eps'"),
        ({"settings": {"grpo": {"eps": "small"}}}, "must be a number"),
        ({"filters": ["max-tokens"]}, "needs the setting 'limit'"),
        ({"advantage": "dr-grpo", "settings": {"dr-grpo": {"eps": 1.0}}}, "it has no settings"),
        ({"shaping": ["overlong"]}, "did you mean 'overlong-penalty'"),
        (
            {"shaping": ["overlong-penalty"], "settings": {"overlong-penalty": {"limit": 9}}},
            "needs the setting 'cushion'",
        ),
        (
            {"shaping": ["overlong-penalty"], "settings": {"overlong-penalty": {"limit": 9, "cushion": 0}}},
            "cushion is 0 of limit 9",
        ),
        (
            {
                "shaping": ["overlong-penalty"],
                "settings": {"overlong-penalty": {"limit": 9, "cushion": 9, "factor": -1}},
            },
            "factor is -1",
        ),
        ({"shaping": ["clip-reward"], "settings": {"clip-reward": {"low": 2.0, "high": 1.0}}}, "low must not be above"),
        ({"shaping": ["weighted-parts"], "settings": {"weighted-parts": {"parts": {}}}}, "parts is empty"),
        (
            {"shaping": ["weighted-parts"], "settings": {"weighted-parts": {"parts": {"right": "much"}}}},
            "coefficient of part 'right' is 'much'",
        ),
        ({"filters": ["overlong"], "settings": {"overlong": {"limit": 0}}}, "limit is 0"),
        ({"filters": ["max-tokens"], "settings": {"max-tokens": {"limit": 0}}}, "limit is 0"),
        ({"filters": ["reward-range"], "settings": {"reward-range": {"low": float("nan")}}}, "low is nan"),
        (
            {"group_filters": ["difficulty-band"], "settings": {"difficulty-band": {"low": 2.0, "high": 1.0}}},
            "not be above",
        ),
        ({"group_filters": ["short-group"], "settings": {"short-group": {"share": 1.5}}}, "at most 1"),
        ({"group_filters": ["zero-spread"], "settings": {"zero-spread": {"tol": -1.0}}}, "tol is -1.0"),
        ({"settings": {"grpo": {"eps": -1.0}}}, "eps is -1.0"),
        ({"settings": {"grpo": {"std": "batch"}}}, "std is 'batch'"),
        ({"advantage": "gdpo", "settings": {"gdpo": {"parts": ["right"]}}}, "must be a table"),
        ({"advantage": "gdpo", "group_size": 1}, "nothing would be learnt"),
        ({"advantage": "opo", "min_members": 1}, "nothing would be learnt"),
        ({"advantage": "maxrl", "min_members": 1}, "nothing would be learnt"),
        ({"min_members": 5}, "no group could ever be used"),
        ({"min_members": 1}, "nothing would be learnt"),
        ({"group_size": 1}, "nothing would be learnt"),
        ({"group_size": 1, "advantage": "rloo"}, "nothing would be learnt"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make_recipe(**{"group_size": 4, **changes})


def test_settings_that_can_work_are_taken() -> None:
    recipe = make_recipe(
        shaping=["weighted-parts", "overlong-penalty", "clip-reward"],
        filters=["invalid-reward", "overlong", "reward-range"],
        group_filters=["short-group", "difficulty-band"],
        advantage="gdpo",
        settings={
            "weighted-parts": {"parts": {"right": 1, "format": 0.5}},
            "overlong-penalty": {"limit": 9, "cushion": 3},
            "clip-reward": {"low": 0.0},
            "overlong": {"limit": 7},
            "reward-range": {"high": 1.0},
            "short-group": {"share": 0.5},
            "difficulty-band": {"low": 0.1, "high": 0.9},
            "gdpo": {"parts": {"right": 1, "format": 0.5}},
        },
        group_size=4,
    )
    assert (len(recipe.shaping), len(recipe.filters), len(recipe.group_filters)) == (3, 3, 2)
