"""Shaping of rewards: each shaper, their order, and what group filters, estimators and outcomes see of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.components import make_recipe
from consumers.pipeline import Judgement, judge
from consumers.shaping.clip_reward import clip_reward
from consumers.shaping.overlong_penalty import overlong_penalty, penalty
from consumers.shaping.weighted_parts import weighted_parts
from schemas.packing import pack_floats
from schemas.records import KEPT, Status, Trajectory
from support.samples import trajectory


def _members(rewards: list[float], sampled: list[int] | None = None, **changes: Any) -> list[Trajectory]:
    """Members with so many sampled tokens each; the other columns do not matter here."""
    lengths = sampled or [3] * len(rewards)
    return [
        trajectory(index=i, group_size=len(rewards), reward=r, logprobs=pack_floats([-1.0] * n), **changes)
        for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))
    ]


def _judge(members: list[Trajectory], **recipe: Any) -> Judgement:
    size = len(members)
    return judge(members, size, make_recipe(**{"advantage": "dr-grpo", "group_size": size, **recipe}))


OVERLONG = {"limit": 20, "cushion": 4}


def test_the_overlong_penalty_at_its_corners() -> None:
    got = [penalty(length, limit=20, cushion=4) for length in (1, 15, 16, 17, 18, 19, 20, 21, 10**6)]
    assert got == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert penalty(18, limit=20, cushion=4, factor=0.5) == -0.25
    assert penalty(20, limit=20, cushion=20) == -1.0
    assert penalty(99, limit=20, cushion=4, factor=0.0) == 0.0


@given(st.integers(0, 99), st.integers(1, 50), st.integers(0, 50), st.floats(0, 10))
def test_the_overlong_penalty_never_rewards_length(length: int, cushion: int, more: int, factor: float) -> None:
    settings: dict[str, Any] = {"limit": cushion + more, "cushion": cushion, "factor": factor}
    assert -factor <= penalty(length + 1, **settings) <= penalty(length, **settings) <= 0


def test_the_overlong_penalty_counts_sampled_tokens() -> None:
    (member,) = _members([1.0], [18])
    assert overlong_penalty(member, 0.25, limit=20, cushion=4) == -0.25


def test_clipping_bounds_what_it_is_given() -> None:
    member = trajectory(reward=7.5)
    assert [clip_reward(member, r, low=-1.0, high=1.0) for r in (7.5, -7.5, 0.5)] == [1.0, -1.0, 0.5]
    assert clip_reward(member, 7.5, low=-1.0) == 7.5


def test_weighted_parts_take_no_missing_part_for_zero() -> None:
    member = trajectory(reward_parts={"digits": 0.5, "format": 0.25})
    assert weighted_parts(member, 0.75, parts={"digits": 2.0, "format": -1.0}) == 0.75
    with pytest.raises(ValueError, match="no part"):
        weighted_parts(member, 0.75, parts={"style": 1.0})
    judged = _judge(
        [*_members([1.0, 0.0]), trajectory(index=2, group_size=3, reward_parts={})],
        shaping=["weighted-parts"],
        settings={"weighted-parts": {"parts": {"digits": 1.0}}},
    )
    assert judged.disposition == "component-failed" and "no part ['digits']" in judged.failure


def test_advantages_come_from_shaped_rewards_and_outcomes_keep_the_raw_ones() -> None:
    members = _members([1.0, 1.0, 0.0, 0.0], [3, 20, 3, 18])
    judged = _judge(members, shaping=["overlong-penalty"], settings={"overlong-penalty": OVERLONG})
    # shaped 1, 0, 0, -0.5: mean 0.125
    assert judged.advantages == (0.875, -0.125, -0.125, -0.625)
    assert [member.reward for member in members] == [1.0, 1.0, 0.0, 0.0]


def test_shapers_work_in_the_order_given() -> None:
    members = _members([1.0, 0.0], [20, 3])
    settings = {"overlong-penalty": OVERLONG, "clip-reward": {"low": 0.5}}
    one = _judge(members, shaping=["overlong-penalty", "clip-reward"], settings=settings)  # (0, 0) -> (0.5, 0.5)
    other = _judge(members, shaping=["clip-reward", "overlong-penalty"], settings=settings)  # (1, 0.5) -> (0, 0.5)
    assert (one.advantages, other.advantages) == ((0.0, 0.0), (-0.25, 0.25))


@pytest.mark.parametrize(("raw", "disposition"), [(False, KEPT), (True, "zero-spread")])
def test_group_filters_can_look_before_or_after(raw: bool, disposition: str) -> None:
    judged = _judge(
        _members([1.0, 1.0], [3, 20]),
        shaping=["overlong-penalty"],
        group_filters=["zero-spread"],
        settings={"overlong-penalty": OVERLONG, "zero-spread": {"raw": raw}},
    )
    assert judged.disposition == disposition


def test_gdpo_sees_shaping_as_a_part() -> None:
    members = _members([1.0, 1.0], [3, 20], reward_parts={"digits": 1.0})
    judged = _judge(members, advantage="gdpo", shaping=["overlong-penalty"], settings={"overlong-penalty": OVERLONG})
    assert judged.advantages == pytest.approx((0.7071, -0.7071), abs=1e-4)
    own = _members([1.0, 1.0], reward_parts={"shaping": 1.0})
    judged = _judge(own, advantage="gdpo", shaping=["overlong-penalty"], settings={"overlong-penalty": OVERLONG})
    assert judged.disposition == "component-failed" and "rename it" in judged.failure


def test_failed_members_are_never_shaped() -> None:
    failed = trajectory(index=2, group_size=3, status=Status.GRADER_ERROR, reward=None)
    judged = _judge(
        [*_members([1.0, 0.0]), failed],
        shaping=["clip-reward"],
        settings={"clip-reward": {"low": 0.25}},
        min_members=2,
    )
    assert judged.members == (KEPT, KEPT, "grader_error")
    assert judged.advantages == (0.375, -0.375, 0.0)


def test_shaping_that_gives_no_number_drops_the_group() -> None:
    judged = _judge(_members([1.0, 0.0]), shaping=["support.processor_components:no_number"])
    assert judged.disposition == "component-failed"
    assert "must be a finite number" in judged.failure
    assert not any(math.isnan(advantage) for advantage in judged.advantages)


def test_a_component_cannot_change_what_the_next_one_sees() -> None:
    judged = _judge(_members([1.0, 0.0]), advantage="support.processor_components:writes")
    assert judged.disposition == "component-failed" and "read-only" in judged.failure
