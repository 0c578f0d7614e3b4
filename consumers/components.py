"""Names of shapers, filters, group filters and estimators, and the recipe that a processor follows.

A new one needs a file, a line in its table here and a test file. One of your own is given as `package.module:name`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumers.group_rewards import GroupRewards, Numbers
from schemas.components import check_settings, load
from schemas.errors import SettingError
from schemas.names import nearest
from schemas.records import Finish, Role, Sampling, Segment, Status, Trajectory, VersionRun

Shaper = Callable[[Trajectory, float], float]
Filter = Callable[[Trajectory], str | None]
GroupFilter = Callable[[GroupRewards], str | None]
Estimator = Callable[[GroupRewards], Numbers]

SHAPING: Mapping[str, str] = {
    "clip-reward": "consumers.shaping.clip_reward:clip_reward",
    "overlong-penalty": "consumers.shaping.overlong_penalty:overlong_penalty",
    "weighted-parts": "consumers.shaping.weighted_parts:weighted_parts",
}
FILTERS: Mapping[str, str] = {
    "invalid-reward": "consumers.filters.invalid_reward:invalid_reward",
    "max-tokens": "consumers.filters.max_tokens:max_tokens",
    "overlong": "consumers.filters.overlong:overlong",
    "reward-range": "consumers.filters.reward_range:reward_range",
    "truncated": "consumers.filters.truncated:truncated",
}
GROUP_FILTERS: Mapping[str, str] = {
    "difficulty-band": "consumers.group_filters.difficulty_band:difficulty_band",
    "short-group": "consumers.group_filters.short_group:short_group",
    "zero-spread": "consumers.group_filters.zero_spread:zero_spread",
}
ADVANTAGES: Mapping[str, str] = {
    "dr-grpo": "consumers.advantages.dr_grpo:dr_grpo",
    "gdpo": "consumers.advantages.gdpo:gdpo",
    "grpo": "consumers.advantages.grpo:grpo",
    "maxrl": "consumers.advantages.maxrl:maxrl",
    "opo": "consumers.advantages.opo:opo",
    "reward": "consumers.advantages.reward:reward",
    "rloo": "consumers.advantages.rloo:rloo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is done with a closed group; plain functions, settings already bound."""

    shaping: tuple[Shaper, ...] = ()
    filters: tuple[Filter, ...] = ()
    group_filters: tuple[GroupFilter, ...] = ()
    advantage: Estimator
    min_members: int = 0
    """Least valid members; 0: all of them."""


def make_recipe(
    *,
    shaping: Sequence[str] = (),
    filters: Sequence[str] = (),
    group_filters: Sequence[str] = (),
    advantage: str = "grpo",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    min_members: int = 0,
    group_size: int,
) -> Recipe:
    """The recipe of these names, with settings by component name. Raises SettingError before anything runs.

    >>> make_recipe(advantage="rloo", group_size=2).advantage(GroupRewards.of([1.0, 0.0])).tolist()
    [1.0, -1.0]
    """
    given = settings or {}
    used = [*shaping, *filters, *group_filters, advantage]
    for name in given:
        if name not in used:
            raise SettingError(f"there are settings for {name!r}, which is not used here; {nearest(name, used)}")

    def bound(kind: str, name: str, table: Mapping[str, str], *probe: object) -> Callable[..., Any]:
        function = load(kind, name, table)
        component = functools.partial(function, **check_settings(kind, name, function, given.get(name, {})))
        if name in table:
            component(*probe)  # ours raise SettingError where a value cannot work, not only its type
        return component

    member, group = _probe_member(given), _probe_group(2)
    recipe = Recipe(
        shaping=tuple(bound("shaping", name, SHAPING, member, 0.75) for name in shaping),
        filters=tuple(bound("filter", name, FILTERS, member) for name in filters),
        group_filters=tuple(bound("group filter", name, GROUP_FILTERS, group) for name in group_filters),
        advantage=bound("advantage", advantage, ADVANTAGES, group),
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
    lone = np.asarray(recipe.advantage(_probe_group(1)))
    if not lone.any():
        what = "group_size is 1" if group_size == 1 else "min_members is 1"
        raise SettingError(
            f"{what}, and the advantage {advantage!r} of a lone member is always 0: nothing would be learnt; "
            "use 2 or more, or an estimator that is not relative to the group"
        )


def _probe_group(num_members: int) -> GroupRewards:
    """A group to try settings on: rewards of 0.75 and above, and every part that may be asked for."""
    group = GroupRewards.of([0.75 + index for index in range(num_members)])
    parts: defaultdict[str, Numbers] = defaultdict(lambda: group.raw, any=group.raw)
    return dataclasses.replace(group, parts=parts)


def _probe_member(settings: Mapping[str, Mapping[str, Any]]) -> Trajectory:
    """A member of one token to try settings on, with every part that they name."""
    parts = {name for own in settings.values() if isinstance(own.get("parts"), Mapping) for name in own["parts"]}
    return Trajectory(
        run="", policy="", group="", group_size=1, index=0, attempt=0, partition=0, task="", environment="", item=0,
        seed=0, first_request_time_ms=0, lifetime_ms=0, sampling=Sampling(), model="", tokenizer="", status=Status.OK,
        finish=Finish.STOP, reward=0.75, reward_parts=dict.fromkeys(parts, 0.75), worker="", session="", region="",
        versions=(VersionRun(0, 0, 1),), segments=(Segment(Role.SAMPLED, 1),), tokens=bytes(4), loss_mask=b"\x01",
        logprobs=bytes(4),
    )  # fmt: skip
