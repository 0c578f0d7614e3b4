"""From closed groups to outcomes: failures are no rewards, baselines are of the group's own valid members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.components import ADVANTAGES, make_recipe
from consumers.pipeline import Judgement, Route, judge, make_outcome, without_payload
from schemas.codec import decode, encode
from schemas.packing import pack_bits
from schemas.records import KEPT, REWARDED, Finish, Outcome, Status, Trajectory
from schemas.rules.closing import ClosedGroup
from schemas.validate import check_outcome
from support.samples import sound_trajectories, trajectory

ROUTE = Route(run="demo", policy="main", source_run="demo", source_policy="main")


def _members(rewards: Sequence[float | Status | None], **changes: Any) -> list[Trajectory]:
    """One trajectory per entry: a reward, or a failure's status."""
    return [
        trajectory(index=i, group_size=len(rewards), status=r, reward=None, **changes)
        if isinstance(r, Status)
        else trajectory(index=i, group_size=len(rewards), reward=r, **changes)
        for i, r in enumerate(rewards)
    ]


def _judge(rewards: Sequence[float | Status | None], size: int | None = None, **recipe: Any) -> Judgement:
    recipe = {"advantage": "dr-grpo", "group_size": size or len(rewards), **recipe}
    return judge(_members(rewards), size or len(rewards), make_recipe(**recipe))


def _outcome(members: Sequence[Trajectory], judgement: Judgement, previous: int = 41) -> Outcome:
    closed = ClosedGroup(
        group="g00000042", size=members[0].group_size, members=tuple((m.index, 100 + m.index, b"") for m in members),
        closing_offset=150, closing_time_ms=9, lifetime_ms=120_000, closed_by="close",
    )  # fmt: skip
    return make_outcome(closed, members, judgement, route=ROUTE, partition=1, previous=previous)


def test_a_whole_group_is_kept_with_advantages() -> None:
    judged = _judge([1.0, 0.0, 1.0, 0.0])
    assert judged == Judgement(disposition=KEPT, members=(KEPT,) * 4, advantages=(0.5, -0.5, 0.5, -0.5))


def test_a_failed_member_makes_its_group_incomplete_unless_fewer_are_allowed() -> None:
    rewards: list[float | Status | None] = [1.0, 0.0, Status.TIMEOUT, Status.ENV_ERROR]
    strict = _judge(rewards)
    assert strict.disposition == "incomplete"
    assert strict.members == ("incomplete", "incomplete", "timeout", "env_error")
    assert strict.advantages == (0.0,) * 4
    loose = _judge(rewards, min_members=2)
    assert loose.disposition == KEPT
    assert loose.members == (KEPT, KEPT, "timeout", "env_error")
    assert loose.advantages == (0.5, -0.5, 0.0, 0.0)  # with rewards of 0 for the failed ones it would be 0.75 and -0.25
    assert _judge(rewards, min_members=3).disposition == "incomplete"


def test_a_missing_member_makes_its_group_incomplete_unless_fewer_are_allowed() -> None:
    assert _judge([1.0, 0.0, 0.5], size=4).disposition == "incomplete"
    judged = _judge([1.0, 0.0, 0.5], size=4, min_members=2)
    assert (judged.disposition, judged.advantages) == (KEPT, (0.5, -0.5, 0.0))


@pytest.mark.parametrize(
    ("rewards", "disposition", "advantages"),
    [
        ([1.0, math.nan, 0.0, None], KEPT, (0.5, 0.0, -0.5, 0.0)),
        ([math.nan, math.nan, 0.3, None], "incomplete", (0.0,) * 4),
        ([None] * 4, "incomplete", (0.0,) * 4),
        ([1.0, math.inf, 0.0, 0.0], KEPT, (2 / 3, 0.0, -1 / 3, -1 / 3)),
    ],
)
def test_rewards_that_are_not_finite_spoil_nobody_else(
    rewards: list[float | None], disposition: str, advantages: tuple[float, ...]
) -> None:
    judged = _judge(rewards, min_members=2)
    assert judged.disposition == disposition
    assert judged.advantages == pytest.approx(advantages)
    assert all(
        said != KEPT for said, r in zip(judged.members, rewards, strict=True) if r is None or not math.isfinite(r)
    )


def test_baselines_are_of_the_group_alone() -> None:
    assert _judge([1.0, 0.0, 1.0, 0.0]).advantages == (0.5, -0.5, 0.5, -0.5)
    assert _judge([5.0, 5.0, 5.0]).advantages == (0.0, 0.0, 0.0)
    assert _judge([2.0, 4.0, 2.0, 4.0]).advantages == (-1.0, 1.0, -1.0, 1.0)


def test_filtered_members_still_count_in_the_baseline() -> None:
    members = _members([1.0, 0.0])
    members[0] = trajectory(index=0, group_size=2, reward=1.0, status=Status.TRUNCATED, finish=Finish.LENGTH)
    recipe = make_recipe(advantage="dr-grpo", filters=["truncated"], group_size=2)
    judged = judge(members, 2, recipe)
    assert judged == Judgement(disposition=KEPT, members=("truncated", KEPT), advantages=(0.0, -0.5))


def test_a_group_without_anybody_left_is_dropped() -> None:
    judged = _judge([1.0, 0.0], filters=["max-tokens"], settings={"max-tokens": {"limit": 1}})
    assert judged == Judgement(disposition="all-filtered", members=("max-tokens",) * 2, advantages=(0.0, 0.0))


def test_zero_spread_drops_the_group() -> None:
    judged = _judge([0.5, 0.5], group_filters=["zero-spread"])
    assert judged == Judgement(disposition="zero-spread", members=("zero-spread",) * 2, advantages=(0.0, 0.0))


def test_lengths_are_of_tokens_that_may_be_trained_on() -> None:
    """Both have seven tokens, three of them sampled; the masks allow one and three."""
    members = [
        trajectory(index=i, group_size=2, reward=reward, loss_mask=pack_bits(np.array(mask)))
        for i, (reward, mask) in enumerate([(1.0, [0, 0, 0, 0, 1, 0, 0]), (0.0, [0, 0, 0, 1, 1, 0, 1])])
    ]
    judged = judge(members, 2, make_recipe(advantage="opo", group_size=2))
    assert judged.advantages == (0.75, -0.25)  # baseline (1 * 1 + 3 * 0) / 4


def test_parts_reach_the_estimator_and_a_missing_one_is_no_zero() -> None:
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 0.0}]
    members = [trajectory(index=i, group_size=3, reward=0.0, reward_parts=own) for i, own in enumerate(parts)]
    settings = {"gdpo": {"parts": {"right": 2.0}}}
    judged = judge(members, 3, make_recipe(advantage="gdpo", settings=settings, group_size=3))
    assert judged.advantages == pytest.approx((4 / 3**0.5, -2 / 3**0.5, -2 / 3**0.5), abs=1e-4)
    judged = judge(members, 3, make_recipe(advantage="gdpo", group_size=3))
    assert judged.disposition == "component-failed" and "lack the reward part 'short'" in judged.failure


@pytest.mark.parametrize("name", ["raises", "not_finite", "one_number"])
def test_a_failing_estimator_drops_the_group_and_says_why(name: str) -> None:
    judged = _judge([1.0, 0.0], advantage=f"support.processor_components:{name}")
    assert (judged.disposition, judged.members) == ("component-failed", ("component-failed",) * 2)
    assert judged.failure
    if name == "raises":
        assert _judge([0.0, 1.0], advantage=f"support.processor_components:{name}").disposition == KEPT


def test_a_reason_may_not_read_as_its_opposite() -> None:
    judged = _judge([1.0, 0.0], filters=["support.processor_components:says_kept"])
    assert judged.disposition == "component-failed"
    assert "None to keep" in judged.failure


def test_an_outcome_carries_payload_of_kept_members_only() -> None:
    members = _members([1.0, 0.0, Status.TIMEOUT])
    outcome = _outcome(members, judge(members, 3, make_recipe(min_members=2, group_size=3)))
    check_outcome(outcome, run="demo", policy="main", partition=1)
    assert [m.disposition for m in outcome.members] == [KEPT, KEPT, "timeout"]
    assert [m.tokens for m in outcome.members] == [members[0].tokens, members[1].tokens, b""]
    assert [(m.num_tokens, m.num_sampled) for m in outcome.members] == [(7, 3)] * 3
    assert [m.offset for m in outcome.members] == [100, 101, 102]
    assert (outcome.oldest_version, outcome.previous, outcome.closing_offset) == (6, 41, 150)
    assert decode(encode(outcome)) == outcome


def test_without_payload_a_group_keeps_its_place() -> None:
    members = _members([1.0, 0.0, Status.TIMEOUT])
    outcome = _outcome(members, judge(members, 3, make_recipe(min_members=2, group_size=3)))
    small = without_payload(outcome, "too-large")
    assert small.disposition == "too-large" and small.oldest_version == -1
    assert [m.disposition for m in small.members] == ["too-large", "too-large", "timeout"]
    assert (small.previous, small.closing_offset, small.group) == (
        outcome.previous,
        outcome.closing_offset,
        outcome.group,
    )
    assert not any(m.tokens or m.advantage for m in small.members)
    check_outcome(small, run="demo", policy="main", partition=1)


@given(st.data())
def test_every_sound_group_becomes_a_sound_outcome(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    indices = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    members = []
    for index in sorted(indices):
        one = data.draw(sound_trajectories())
        reward = None if one.reward is None else data.draw(st.floats(-10, 10))
        members.append(
            trajectory(
                **{name: getattr(one, name) for name in one.__slots__}
                | {"index": index, "group_size": size, "reward": reward}
            )
        )
    recipe = make_recipe(
        advantage=data.draw(st.sampled_from(sorted(ADVANTAGES.keys() - {"maxrl"}))),  # rewards below 0 here
        filters=["truncated"],
        group_filters=data.draw(st.sampled_from([[], ["zero-spread"]])),
        min_members=data.draw(st.sampled_from([0, 2])),
        group_size=size,
    )
    outcome = _outcome(members, judge(members, size, recipe))
    check_outcome(outcome, run="demo", policy="main", partition=1)
    assert outcome.kept == any(m.disposition == KEPT for m in outcome.members)
    for member, source in zip(outcome.members, members, strict=True):
        assert member.disposition != KEPT or (source.status in REWARDED and outcome.kept)
        assert member.disposition == KEPT or member.advantage == 0
