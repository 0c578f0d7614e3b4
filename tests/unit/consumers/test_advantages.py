"""Estimators: against formula-shaped twins, and by their properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from consumers.advantages.dr_grpo import dr_grpo
from consumers.advantages.grpo import grpo
from consumers.advantages.rloo import rloo

Estimator = Callable[[NDArray[np.float64]], NDArray[np.float64]]
ALL: list[Estimator] = [grpo, dr_grpo, rloo]
REWARDS = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=1, max_size=16)
each = pytest.mark.parametrize("estimator", ALL)


def _array(rewards: list[float]) -> NDArray[np.float64]:
    return np.array(rewards, dtype=np.float64)


def _slow(name: str, rewards: list[float]) -> list[float]:
    """The formulae written out with sums over members."""
    size = len(rewards)
    if size == 1:
        return [0.0]
    mean = math.fsum(rewards) / size
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (size - 1))
    if name == "grpo":
        return [(r - mean) / (std + 1e-6) for r in rewards]
    if name == "rloo":
        return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (size - 1) for i, r in enumerate(rewards)]
    return [r - mean for r in rewards]


@each
@given(rewards=REWARDS)
def test_equals_its_formula(estimator: Estimator, rewards: list[float]) -> None:
    np.testing.assert_allclose(estimator(_array(rewards)), _slow(estimator.__name__, rewards), rtol=1e-7, atol=1e-7)


@each
@given(rewards=REWARDS)
def test_sums_to_zero(estimator: Estimator, rewards: list[float]) -> None:
    assert abs(estimator(_array(rewards)).sum()) < 1e-9 * 100 * len(rewards) ** 2


@each
@given(rewards=REWARDS, draw=st.randoms(use_true_random=False))
def test_order_of_members_does_not_matter(estimator: Estimator, rewards: list[float], draw: object) -> None:
    order = list(range(len(rewards)))
    draw.shuffle(order)  # type: ignore[attr-defined]
    values = _array(rewards)
    np.testing.assert_allclose(estimator(values[order]), estimator(values)[order], rtol=1e-9, atol=1e-9)


@each
@given(rewards=REWARDS, by=st.floats(-50, 50))
def test_a_shift_of_all_rewards_changes_nothing(estimator: Estimator, rewards: list[float], by: float) -> None:
    values = np.round(_array(rewards), 1)
    np.testing.assert_allclose(estimator(values + np.round(by, 1)), estimator(values), atol=1e-4)


@each
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_equal_rewards_and_lone_samples_are_exactly_zero(estimator: Estimator, reward: float, size: int) -> None:
    assert estimator(_array([reward] * size)).tolist() == [0.0] * size


@each
def test_better_members_get_more_and_the_input_is_left_alone(estimator: Estimator) -> None:
    values = _array([0.0, 1.0, 0.5])
    advantages = estimator(values)
    assert advantages[0] < advantages[2] < advantages[1]
    assert values.tolist() == [0.0, 1.0, 0.5]


def test_worked_numbers() -> None:
    np.testing.assert_allclose(grpo(_array([1, 0, 1, 0])), np.array([1, -1, 1, -1]) * 0.5 / (math.sqrt(1 / 3) + 1e-6))
    assert dr_grpo(_array([2, 4, 2, 4])).tolist() == [-1, 1, -1, 1]
    np.testing.assert_allclose(rloo(_array([1, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])
    assert grpo(_array([1, 0]), eps=1.0)[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1))
