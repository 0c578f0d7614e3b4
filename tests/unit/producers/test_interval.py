"""Intervals of mean rewards: tables, and how often they hold the truth."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.interval import Z_95, estimate, t_95, wilson

TABLE = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    9: 2.2622,
    10: 2.2281,
    29: 2.0452,
    60: 2.0003,
    120: 1.9799,
}
"""The 97.5 % points of Student's distribution, as every table has them."""


@pytest.mark.parametrize("freedom", TABLE)
def test_students_quantile_is_that_of_the_tables(freedom: int) -> None:
    assert t_95(freedom) == pytest.approx(TABLE[freedom], abs=5e-5)


def test_the_quantile_falls_towards_the_normal_one_without_a_step() -> None:
    found = [t_95(freedom) for freedom in range(900, 1100)]
    assert found == sorted(found, reverse=True) and found[-1] > Z_95
    assert max(a - b for a, b in itertools.pairwise(found)) < 1e-5


@given(successes=st.integers(0, 300), failures=st.integers(0, 300))
def test_wilsons_bounds_solve_its_equation(successes: int, failures: int) -> None:
    """At a bound the observed share lies exactly z standard errors of that bound away."""
    trials = successes + failures
    if not trials:
        return
    share, low, high = wilson(successes, trials)
    assert 0 <= low <= share <= high <= 1 and low < high
    for bound in (low, high):
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(Z_95 * math.sqrt(bound * (1 - bound) / trials), abs=1e-9)


@given(rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_bounds_hold_the_mean_between_them(rewards: list[float]) -> None:
    found = estimate(rewards)
    assert found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(math.fsum(rewards) / len(rewards))


@pytest.mark.parametrize("kind", ["yes or no", "graded"])
def test_about_95_of_100_intervals_hold_the_truth(kind: str) -> None:
    rng, held = random.Random(0), 0
    for _ in range(2000):
        rewards = [float(rng.random() < 0.3) if kind == "yes or no" else rng.gauss(0.3, 1.0) for _ in range(20)]
        found = estimate(rewards)
        held += found.low <= 0.3 <= found.high
    assert 0.93 < held / 2000 < 0.98


@pytest.mark.parametrize(("rewards", "said"), [([], "no reward"), ([0.5], "no spread")])
def test_what_has_no_interval_is_refused(rewards: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate(rewards)


def test_a_lone_success_has_a_wide_interval() -> None:
    assert estimate([1.0]) == wilson(1, 1) and estimate([1.0]).low < 0.21


def test_doctests() -> None:
    result = doctest.testmod(importlib.import_module("producers.interval"))
    assert result.attempted and not result.failed
