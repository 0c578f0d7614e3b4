"""Filters of members and of groups."""

from __future__ import annotations

import math

import pytest

from consumers.filters.invalid_reward import invalid_reward
from consumers.filters.max_tokens import max_tokens
from consumers.filters.truncated import truncated
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


def test_zero_spread_looks_at_the_range() -> None:
    assert zero_spread(GroupRewards.of([0.2, 0.2, 0.2])) == "zero-spread"
    assert zero_spread(GroupRewards.of([0.2])) == "zero-spread"
    assert zero_spread(GroupRewards.of([0.2, 0.2, 0.3])) is None
    assert zero_spread(GroupRewards.of([0.2, 0.25]), tol=0.1) == "zero-spread"
