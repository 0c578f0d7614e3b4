"""Filters of members and of groups."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.filters.invalid_reward import invalid_reward
from consumers.filters.max_tokens import max_tokens
from consumers.filters.overlong import overlong
from consumers.filters.reward_range import reward_range
from consumers.filters.truncated import truncated
from consumers.group_filters.difficulty_band import difficulty_band
from consumers.group_filters.short_group import short_group
from consumers.group_filters.zero_spread import zero_spread
from consumers.group_rewards import GroupRewards
from schemas.records import REWARDED, Finish, Status
from support.samples import trajectory


@pytest.mark.parametrize("status", sorted(set(Status) - REWARDED))
def test_failed_attempts_are_invalid_by_their_status_even_with_a_number(status: Status) -> None:
    assert invalid_reward(trajectory(status=status, reward=None)) == status.value
    assert invalid_reward(trajectory(status=status, reward=0.0)) == status.value


@pytest.mark.parametrize("status", sorted(REWARDED))
def test_rewards_are_needed_and_finite(status: Status) -> None:
    assert invalid_reward(trajectory(status=status, reward=0.0)) is None
    assert invalid_reward(trajectory(status=status, reward=None)) == "no-reward"
    for reward in (math.nan, math.inf, -math.inf):
        assert invalid_reward(trajectory(status=status, reward=reward)) == "non-finite-reward"


def test_nothing_sampled_is_nothing_to_train_on() -> None:
    assert invalid_reward(trajectory(logprobs=b"")) == "no-tokens"


def test_max_tokens_counts_sampled_tokens_of_all_turns() -> None:
    assert max_tokens(trajectory(), limit=3) is None
    assert max_tokens(trajectory(), limit=2) == "max-tokens"


def test_truncated_looks_at_status_and_finish() -> None:
    assert truncated(trajectory()) is None
    assert truncated(trajectory(status=Status.TRUNCATED)) == "truncated"
    assert truncated(trajectory(status=Status.INVALID_ACTION, finish=Finish.LENGTH)) == "truncated"


def test_overlong_counts_all_tokens() -> None:
    assert overlong(trajectory(), limit=7) is None
    assert overlong(trajectory(), limit=6) == "overlong"


def test_reward_range_looks_at_the_reward_before_shaping() -> None:
    kept = [reward_range(trajectory(reward=r), low=0.0, high=1.0) for r in (0.0, 0.5, 1.0)]
    assert kept == [None] * 3
    assert [reward_range(trajectory(reward=r), low=0.0, high=1.0) for r in (-0.1, 1.1)] == ["reward-range"] * 2
    assert reward_range(trajectory(reward=1e9), low=0.0) is None
    assert reward_range(trajectory(reward=-1e9), high=0.0) is None


def test_zero_spread_looks_at_the_range() -> None:
    of = GroupRewards.of
    assert zero_spread(of([0.2, 0.2, 0.2])) == "zero-spread"
    assert zero_spread(of([0.2])) == "zero-spread"
    assert zero_spread(of([0.2, 0.2, 0.3])) is None
    assert zero_spread(of([0.2, 0.25]), tol=0.1) == "zero-spread"
    assert zero_spread(of([0.3, 0.1 + 0.2])) == "zero-spread"


def test_zero_spread_before_or_after_shaping() -> None:
    shaped = GroupRewards.of([1.0, 0.5], raw=[1.0, 1.0])
    assert (zero_spread(shaped), zero_spread(shaped, raw=True)) == (None, "zero-spread")
    clipped = GroupRewards.of([1.0, 1.0], raw=[1.0, 7.5])
    assert (zero_spread(clipped), zero_spread(clipped, raw=True)) == ("zero-spread", None)


def test_difficulty_band_keeps_its_bounds_and_looks_before_shaping() -> None:
    of = GroupRewards.of
    assert difficulty_band(of([0.1] * 10), low=0.1, high=0.1) is None
    assert difficulty_band(of([1, 0, 0, 0]), low=0.3) == "too-hard"
    assert difficulty_band(of([1, 1, 1, 0]), high=0.7) == "too-easy"
    assert difficulty_band(of([0, 0], raw=[1, 0]), low=0.5, high=0.5) is None


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.integers(0, 99))
def test_group_filters_do_not_see_the_order_of_members(rewards: list[float], seed: int) -> None:
    shuffled = random.Random(seed).sample(rewards, len(rewards))
    mean = math.fsum(rewards) / len(rewards)
    for one, other in [(GroupRewards.of(rewards), GroupRewards.of(shuffled))]:
        assert zero_spread(one, tol=1.0) == zero_spread(other, tol=1.0)
        assert difficulty_band(one, low=mean) == difficulty_band(other, low=mean) is None


def test_short_group_is_relative_to_the_size_asked_for() -> None:
    of = GroupRewards.of
    assert short_group(of([1, 0]), share=1.0) is None
    assert short_group(of([1, 0], size=3), share=1.0) == "short-group"
    assert short_group(of([1, 0], size=4), share=0.5) is None
    assert short_group(of([1, 0], size=5), share=0.5) == "short-group"
