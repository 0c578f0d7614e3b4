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
        ({"min_members": 5}, "no group could ever be used"),
        ({"min_members": 1}, "nothing would be learnt"),
        ({"group_size": 1}, "nothing would be learnt"),
        ({"group_size": 1, "advantage": "rloo"}, "nothing would be learnt"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make_recipe(**{"group_size": 4, **changes})
