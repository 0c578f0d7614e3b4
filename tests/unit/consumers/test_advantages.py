"""Estimators: against formula-shaped twins, and by their properties."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages.dr_grpo import dr_grpo
from consumers.advantages.gdpo import gdpo
from consumers.advantages.grpo import grpo
from consumers.advantages.maxrl import maxrl
from consumers.advantages.opo import opo
from consumers.advantages.reward import reward as reward_itself
from consumers.advantages.rloo import rloo
from consumers.components import ADVANTAGES
from consumers.group_rewards import GroupRewards, Numbers, centred, differ, standard_scores
from schemas.errors import SettingError

Row = tuple[float, int, float]
"""Reward, length, another part of the reward."""
ROWS = st.lists(
    st.tuples(st.integers(0, 100_000).map(lambda r: r / 1000), st.integers(1, 999), st.integers(-5, 5).map(float)),
    min_size=1,
    max_size=16,
)
BY_NAME: dict[str, Callable[..., Numbers]] = {
    "grpo": grpo,
    "grpo, population": functools.partial(grpo, std="population"),
    "grpo, none": functools.partial(grpo, std="none"),
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "gdpo": functools.partial(gdpo, parts={"main": 1.0, "other": -0.5}),
}
SHIFTED = sorted(BY_NAME.keys() - {"maxrl"})  # a shift of all rewards changes nothing
HOMOGENEOUS = ["dr-grpo", "grpo, none", "opo", "rloo"]  # twice the rewards, twice the advantages
SCALE_FREE = ["gdpo", "grpo", "grpo, population", "maxrl"]  # twice the rewards, the same advantages, up to eps
each = pytest.mark.parametrize("name", sorted(BY_NAME))


def _group(rows: list[Row], *, scale: float = 1.0, shift: float = 0.0) -> GroupRewards:
    rewards = [scale * reward + shift for reward, _, _ in rows]
    other = [scale * part + shift for _, _, part in rows]
    return GroupRewards.of(rewards, lengths=[length for _, length, _ in rows], parts={"main": rewards, "other": other})


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _scores(values: list[float], divisor: int) -> list[float]:
    std = math.sqrt(math.fsum((v - _mean(values)) ** 2 for v in values) / divisor)
    return [(v - _mean(values)) / (std + 1e-6) for v in values]


def _slow(name: str, rows: list[Row]) -> list[float]:
    """The formulae written out with sums over members."""
    rewards = [reward for reward, _, _ in rows]
    size, mean = len(rewards), _mean(rewards)
    if size == 1:
        return [0.0]
    formulae: dict[str, Callable[[], list[float]]] = {
        "grpo": lambda: _scores(rewards, size - 1),
        "grpo, population": lambda: _scores(rewards, size),
        "rloo": lambda: [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (size - 1) for i, r in enumerate(rewards)],
        "opo": lambda: [
            r - math.fsum(length * s for s, length, _ in rows) / sum(length for _, length, _ in rows) for r in rewards
        ],
        "maxrl": lambda: [(r - mean) / (mean + 1e-6) for r in rewards],
        "gdpo": lambda: [
            a - 0.5 * b
            for a, b in zip(_scores(rewards, size - 1), _scores([other for _, _, other in rows], size - 1), strict=True)
        ],
    }
    return formulae.get(name, lambda: [r - mean for r in rewards])()


def test_every_known_estimator_is_tried_here() -> None:
    assert {name.partition(",")[0] for name in BY_NAME} | {"reward"} == ADVANTAGES.keys()


@given(rows=ROWS)
def test_the_reward_itself_needs_no_group(rows: list[Row]) -> None:
    """The only one without a baseline, so none of the properties below is its."""
    group = _group(rows)
    assert reward_itself(group).tolist() == [reward for reward, _, _ in rows]
    assert reward_itself(group) is not group.rewards


@each
@given(rows=ROWS)
def test_equals_its_formula(name: str, rows: list[Row]) -> None:
    np.testing.assert_allclose(BY_NAME[name](_group(rows)), _slow(name, rows), rtol=1e-7, atol=1e-7)


@each
@given(rows=ROWS, seed=st.integers(0, 999))
def test_order_of_members_does_not_matter(name: str, rows: list[Row], seed: int) -> None:
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    shuffled = BY_NAME[name](_group([rows[i] for i in order]))
    np.testing.assert_allclose(shuffled, BY_NAME[name](_group(rows))[order], rtol=1e-9, atol=1e-9)


@each
@given(rows=ROWS)
def test_advantages_of_a_group_balance(name: str, rows: list[Row]) -> None:
    """Each sums to 0 over members; opo over tokens."""
    group = _group(rows)
    weights = group.lengths if name == "opo" else np.ones(len(rows))
    advantages = BY_NAME[name](group)
    if differ(group.rewards) or name != "opo":
        assert abs(float(weights @ advantages)) < 1e-9 * 100 * float(weights.sum()) * len(rows)


@pytest.mark.parametrize("name", SHIFTED)
@given(rows=ROWS, by=st.integers(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(name: str, rows: list[Row], by: int) -> None:
    np.testing.assert_allclose(BY_NAME[name](_group(rows, shift=by)), BY_NAME[name](_group(rows)), atol=1e-5)


@pytest.mark.parametrize("name", HOMOGENEOUS)
@given(rows=ROWS, by=st.integers(1, 50))
def test_rewards_in_another_unit_give_advantages_in_that_unit(name: str, rows: list[Row], by: int) -> None:
    np.testing.assert_allclose(BY_NAME[name](_group(rows, scale=by)), by * BY_NAME[name](_group(rows)), atol=1e-7)


@pytest.mark.parametrize("name", SCALE_FREE)
@given(rows=ROWS, by=st.integers(1, 50))
def test_the_unit_of_rewards_does_not_matter_where_they_are_divided(name: str, rows: list[Row], by: int) -> None:
    estimator = functools.partial(BY_NAME[name], eps=1e-12)  # eps alone tells units apart
    scaled, plain = estimator(_group(rows, scale=by)), estimator(_group(rows))
    np.testing.assert_allclose(scaled, plain, rtol=1e-6, atol=1e-6)


@each
@given(reward=st.floats(0, 1e6), size=st.integers(1, 9), length=st.integers(1, 99))
def test_equal_rewards_and_lone_samples_are_exactly_zero(name: str, reward: float, size: int, length: int) -> None:
    rows = [(reward, length + i, reward) for i in range(size)]
    assert BY_NAME[name](_group(rows)).tolist() == [0.0] * size


@each
def test_better_members_get_more(name: str) -> None:
    low, high, middle = BY_NAME[name](_group([(0.0, 3, 1.0), (1.0, 5, 1.0), (0.5, 1, 1.0)]))
    assert low < middle < high


@each
@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_short_group_is_a_group_of_those_who_are_there(name: str, size: int) -> None:
    """How many are missing changes nothing: neither a 0 for them nor a division by the size asked for."""
    rows: list[Row] = [(1.0, 3, 2.0), (0.0, 5, 1.0), (0.5, 2, 1.0)]
    whole = _group(rows)
    short = GroupRewards.of(whole.rewards, lengths=whole.lengths, parts=whole.parts, size=size)
    assert BY_NAME[name](short).tolist() == BY_NAME[name](whole).tolist()


def test_worked_numbers() -> None:
    of = GroupRewards.of
    np.testing.assert_allclose(grpo(of([1, 0, 1, 0])), np.array([1, -1, 1, -1]) * 0.5 / (math.sqrt(1 / 3) + 1e-6))
    np.testing.assert_allclose(grpo(of([1, 0, 1, 0]), std="population", eps=0.0), [1, -1, 1, -1])
    assert grpo(of([1, 0]), eps=1.0)[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1))
    assert dr_grpo(of([2, 4, 2, 4])).tolist() == [-1, 1, -1, 1]
    np.testing.assert_allclose(rloo(of([1, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(opo(of([1, 0, 0], lengths=[100, 50, 50])), [0.5, -0.5, -0.5])
    np.testing.assert_allclose(opo(of([1, 0, 1], lengths=[7, 7, 7])), dr_grpo(of([1, 0, 1])), atol=1e-15)
    assert opo(of([1, 0], lengths=[0, 0])).tolist() == [0, 0]
    np.testing.assert_allclose(maxrl(of([1, 1, 0, 0, 0]), eps=0.0), [1.5, 1.5, -1, -1, -1])  # (G - K) / K = 3 / 2


def test_maxrl_refuses_rewards_below_zero() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        maxrl(GroupRewards.of([1.0, -0.5]))


def test_gdpo_keeps_a_small_part_that_grpo_of_the_sum_drowns() -> None:
    parts = {"score": [0.0, 100.0, 0.0, 100.0], "format": [0.1, 0.0, 0.0, 0.1]}
    group = GroupRewards.of(np.add(parts["score"], parts["format"]), parts=parts)
    drowned, kept = grpo(group), gdpo(group)
    assert drowned[0] - drowned[2] < 0.01 and kept[0] - kept[2] > 1
    assert gdpo(group, parts={"format": 1.0})[:2].tolist() == pytest.approx([0.8660, -0.8660], abs=1e-4)


def test_gdpo_counts_what_shaping_added_unless_told_how_much() -> None:
    group = GroupRewards.of([1.0, 0.5], raw=[1.0, 1.0], parts={"right": [1.0, 1.0], "shaping": [0.0, -0.5]})
    assert gdpo(group)[0] == gdpo(group, parts={"right": 1.0})[0] == pytest.approx(0.7071, abs=1e-4)
    assert gdpo(group, parts={"right": 1.0, "shaping": 0.0}).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("parts", "named", "said"),
    [
        ({}, None, "gives none"),
        ({"shaping": [0.0, 1.0]}, None, "gives none"),
        ({"right": [1.0, 0.0]}, {"wrong": 1.0}, "no member has the reward part 'wrong'"),
        ({"right": [1.0, math.nan]}, None, "some members lack the reward part 'right'"),
    ],
)
def test_gdpo_takes_no_missing_part_for_zero(
    parts: dict[str, list[float]], named: dict[str, float] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        gdpo(GroupRewards.of([1.0, 0.0], parts=parts), parts=named)


def test_a_normalisation_that_is_not_known_is_refused() -> None:
    with pytest.raises(SettingError, match="'sample', 'population' or 'none'"):
        grpo(GroupRewards.of([1.0, 0.0]), std="ddof1")


def test_groups_are_fixed_copies() -> None:
    rewards = np.array([1.0, 0.0])
    group = GroupRewards.of(rewards)
    rewards[0] = 9.0
    assert group.rewards.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        group.rewards[0] = 9.0


def test_shared_formulae() -> None:
    values = np.array([0.1] * 7)
    assert centred(values).tolist() == standard_scores(values, ddof=1, eps=0.0).tolist() == [0.0] * 7
    assert not differ(values) and not differ(values[:1]) and differ(np.array([0.1, 0.2]))
