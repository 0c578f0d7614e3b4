"""Names of filters, group filters and estimators, and the recipe that a processor follows.

A new one needs a file, a line in its table here and a test file. One of your own is given as `package.module:name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.components import check_settings, load
from schemas.errors import SettingError
from schemas.names import nearest
from schemas.records import Trajectory

Rewards = NDArray[np.float64]
Filter = Callable[[Trajectory], str | None]
GroupFilter = Callable[[Rewards], str | None]
Estimator = Callable[[Rewards], Rewards]

FILTERS: Mapping[str, str] = {
    "invalid-reward": "consumers.filters.invalid_reward:invalid_reward",
    "max-tokens": "consumers.filters.max_tokens:max_tokens",
    "truncated": "consumers.filters.truncated:truncated",
}
GROUP_FILTERS: Mapping[str, str] = {
    "zero-spread": "consumers.group_filters.zero_spread:zero_spread",
}
ADVANTAGES: Mapping[str, str] = {
    "dr-grpo": "consumers.advantages.dr_grpo:dr_grpo",
    "grpo": "consumers.advantages.grpo:grpo",
    "rloo": "consumers.advantages.rloo:rloo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is done with a closed group; plain functions, settings already bound."""

    filters: tuple[Filter, ...] = ()
    group_filters: tuple[GroupFilter, ...] = ()
    advantage: Estimator
    min_members: int = 0
    """Least valid members; 0: all of them."""


def make_recipe(
    *,
    filters: Sequence[str] = (),
    group_filters: Sequence[str] = (),
    advantage: str = "grpo",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    min_members: int = 0,
    group_size: int,
) -> Recipe:
    """The recipe of these names, with settings by component name. Raises SettingError before anything runs.

    >>> make_recipe(advantage="rloo", group_size=2).advantage(np.array([1.0, 0.0])).tolist()
    [1.0, -1.0]
    """
    given = settings or {}
    used = [*filters, *group_filters, advantage]
    for name in given:
        if name not in used:
            raise SettingError(f"there are settings for {name!r}, which is not used here; {nearest(name, used)}")

    def bound(kind: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
        function = load(kind, name, table)
        return functools.partial(function, **check_settings(kind, name, function, given.get(name, {})))

    recipe = Recipe(
        filters=tuple(bound("filter", name, FILTERS) for name in filters),
        group_filters=tuple(bound("group filter", name, GROUP_FILTERS) for name in group_filters),
        advantage=bound("advantage", advantage, ADVANTAGES),
        min_members=min_members,
    )
    _check_sizes(recipe, advantage, group_size)
    return recipe


def _check_sizes(recipe: Recipe, advantage: str, group_size: int) -> None:
    if recipe.min_members > group_size:
        raise SettingError(
            f"min_members is {recipe.min_members} of a group of {group_size}: no group could ever be used; "
            f"set it to 0 (all members) or 2 to {group_size}"
        )
    if group_size > 1 and recipe.min_members != 1:
        return
    lone = np.asarray(recipe.advantage(np.array([0.75])))
    if not lone.any():
        what = "group_size is 1" if group_size == 1 else "min_members is 1"
        raise SettingError(
            f"{what}, and the advantage {advantage!r} of a lone member is always 0: nothing would be learnt; "
            "use 2 or more, or an estimator that is not relative to the group"
        )
