"""From a closed group to its outcome: who is valid, what the group is worth, who is trained on. Pure.

In this order: members without a valid reward are set aside (a failure is never a reward of 0); a group with too few
valid ones is dropped as "incomplete"; rewards are shaped; group filters see the valid members' numbers; advantages come
from all valid members; then member filters say who of them is not trained on. So a filter never changes a sibling's
baseline. The outcome carries rewards as the environment gave them; shaping shows in the advantages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumers.components import Recipe
from consumers.filters.invalid_reward import invalid_reward
from consumers.group_rewards import SHAPING_PART, GroupRewards, Numbers
from schemas.records import KEPT, Member, Outcome, Role, Trajectory
from schemas.rules.closing import ClosedGroup
from schemas.rules.versions import oldest_version
from schemas.shape import maker

INCOMPLETE = "incomplete"
ALL_FILTERED = "all-filtered"
COMPONENT_FAILED = "component-failed"
TOO_LARGE = "too-large"
_SAMPLED = Role.SAMPLED
_MEMBER_FIELDS = (
    "index", "attempt", "offset", "status", "disposition", "reward", "reward_parts", "step_rewards", "advantage",
    "num_tokens", "num_sampled", "temperature", "old_kv", "versions", "segments", "tokens", "loss_mask", "logprobs",
)  # fmt: skip
_make_member = maker(Member, _MEMBER_FIELDS)
"""Three times faster than the constructor of a frozen dataclass, which sets one field after the other in Python."""


class ComponentFailed(Exception):
    """A filter or an estimator raised, or returned what it may not; its group is dropped as "component-failed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Whose trajectories become whose samples; the two differ in a derived run."""

    run: str
    policy: str
    source_run: str
    source_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a recipe says of a group: one disposition for it, one and an advantage for each member."""

    disposition: str
    members: tuple[str, ...]
    advantages: tuple[float, ...]
    failure: str = ""
    """What a component of the user's did wrong, for the log."""


def judge(members: Sequence[Trajectory], size: int, recipe: Recipe) -> Judgement:
    """Apply a recipe to a group's members; `size` is how many were asked for."""
    invalid = [invalid_reward(member) for member in members]
    valid = [member for member, reason in zip(members, invalid, strict=True) if reason is None]
    try:
        with np.errstate(all="ignore"):  # what is not finite is met below, with the rewards that caused it
            dropped, filtered, advantages = _apply(valid, size, recipe)
        failure = ""
    except ComponentFailed as error:
        dropped, filtered, advantages = COMPONENT_FAILED, [None] * len(valid), [0.0] * len(valid)
        failure = str(error)
    verdicts = iter(zip(filtered, advantages, strict=True))
    pairs = [(reason, 0.0) if reason is not None else next(verdicts) for reason in invalid]
    return Judgement(
        disposition=dropped or KEPT,
        members=tuple(own or dropped or KEPT for own, _ in pairs),
        advantages=tuple(0.0 if own or dropped else advantage for own, advantage in pairs),
        failure=failure,
    )


def _apply(valid: Sequence[Trajectory], size: int, recipe: Recipe) -> tuple[str | None, list[str | None], list[float]]:
    """Why the group is dropped (None: kept), and each valid member's own reason and advantage."""
    nothing: tuple[list[str | None], list[float]] = [None] * len(valid), [0.0] * len(valid)
    if len(valid) < (recipe.min_members or size):
        return INCOMPLETE, *nothing
    group = _numbers(valid, size, recipe)
    for group_filter in recipe.group_filters:
        reason = _call("group filter", group_filter, group)
        if reason is not None:
            return _reason("group filter", reason), *nothing
    advantages = _advantages(group, recipe)
    filtered = [_member_reason(member, recipe) for member in valid]
    return (ALL_FILTERED if all(filtered) else None), filtered, advantages.tolist()


def make_outcome(
    closed: ClosedGroup[Any],
    trajectories: Sequence[Trajectory],
    judgement: Judgement,
    *,
    route: Route,
    partition: int,
    previous: int,
) -> Outcome:
    """The outcome of a closed group whose members are these, chained to the closing offset before it."""
    members = tuple(
        _member(trajectory, offset, disposition, advantage)
        for (_, offset, _), trajectory, disposition, advantage in zip(
            closed.members, trajectories, judgement.members, judgement.advantages, strict=True
        )
    )
    first = trajectories[0]
    oldest = oldest_version(run for member in members if member.disposition == KEPT for run in member.versions)
    return Outcome(
        run=route.run,
        policy=route.policy,
        source_run=route.source_run,
        source_policy=route.source_policy,
        partition=partition,
        group=closed.group,
        group_size=closed.size,
        task=first.task,
        environment=first.environment,
        item=first.item,
        closing_offset=closed.closing_offset,
        previous=previous,
        closing_time_ms=closed.closing_time_ms,
        lifetime_ms=closed.lifetime_ms,
        closed_by=closed.closed_by,
        disposition=judgement.disposition,
        oldest_version=-1 if oldest is None else oldest,
        members=members,
    )


def without_payload(outcome: Outcome, reason: str) -> Outcome:
    """The same group, dropped for `reason`: it keeps its place in the chain and says what became of its members."""
    empty: dict[str, Any] = {"reward_parts": {}, "step_rewards": (), "versions": (), "segments": ()}
    empty |= {"advantage": 0.0, "tokens": b"", "loss_mask": b"", "logprobs": b""}
    members = tuple(
        dataclasses.replace(member, disposition=reason if member.disposition == KEPT else member.disposition, **empty)
        for member in outcome.members
    )
    return dataclasses.replace(outcome, disposition=reason, oldest_version=-1, members=members)


def _numbers(valid: Sequence[Trajectory], size: int, recipe: Recipe) -> GroupRewards:
    """What group filters and the estimator see."""
    raw: Any = [member.reward for member in valid]
    shaped = [_shaped(member, recipe) for member in valid] if recipe.shaping else None
    names = sorted({name for member in valid for name in member.reward_parts})
    parts: dict[str, Any] = {name: [member.reward_parts.get(name, math.nan) for member in valid] for name in names}
    if shaped is not None:
        if SHAPING_PART in parts:
            raise ComponentFailed(f"the environment has a reward part {SHAPING_PART!r}; with shaping set, rename it")
        parts[SHAPING_PART] = np.array(shaped) - np.array(raw)
    # The padding of a packed mask is 0, which `schemas.validate` holds true.
    lengths = [int.from_bytes(member.loss_mask, "little").bit_count() for member in valid]
    if shaped is None:
        return GroupRewards.of(raw, lengths=lengths, parts=parts, size=size)
    return GroupRewards.of(shaped, raw=raw, lengths=lengths, parts=parts, size=size)


def _shaped(member: Trajectory, recipe: Recipe) -> float:
    assert member.reward is not None
    reward = member.reward
    for shaper in recipe.shaping:
        found = _call("shaping", shaper, member, reward)
        if (
            isinstance(found, bool)
            or not isinstance(found, (int, float, np.integer, np.floating))
            or not math.isfinite(found)
        ):
            raise ComponentFailed(f"shaping {shaper!r} returned {found!r} for {reward}; it must be a finite number")
        reward = float(found)
    return reward


def _member_reason(member: Trajectory, recipe: Recipe) -> str | None:
    for keep in recipe.filters:
        reason = _call("filter", keep, member)
        if reason is not None:
            return _reason("filter", reason)
    return None


def _advantages(group: GroupRewards, recipe: Recipe) -> Numbers:
    rewards = group.rewards
    found = _call("advantage", recipe.advantage, group)
    try:
        advantages = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ComponentFailed(f"advantage returned {found!r}, not an array of numbers") from error
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise ComponentFailed(
            f"advantage returned {advantages!r} for rewards {rewards!r}; it must be as many finite numbers"
        )
    return advantages


def _call(kind: str, function: Callable[..., object], *arguments: object) -> object:
    try:
        return function(*arguments)
    except Exception as error:  # the edge to the user's code: one bad group must not stop a partition
        raise ComponentFailed(f"{kind} {function!r} raised {type(error).__name__}: {error}") from error


def _reason(kind: str, reason: object) -> str:
    if not isinstance(reason, str) or not reason or reason == KEPT:
        raise ComponentFailed(f"{kind} returned {reason!r}; it must return None to keep, or why not as a text")
    return reason


def _member(trajectory: Trajectory, offset: int, disposition: str, advantage: float) -> Member:
    is_kept = disposition == KEPT
    reward, segments = trajectory.reward, trajectory.segments
    return _make_member(
        (
            trajectory.index,
            trajectory.attempt,
            offset,
            trajectory.status,
            disposition,
            None if reward is None or not math.isfinite(reward) else reward,
            trajectory.reward_parts,
            trajectory.step_rewards,
            advantage,
            sum([count for _, count in segments]),
            sum([count for role, count in segments if role is _SAMPLED]),
            trajectory.sampling.temperature,
            trajectory.old_kv,
            trajectory.versions if is_kept else (),
            segments if is_kept else (),
            trajectory.tokens if is_kept else b"",
            trajectory.loss_mask if is_kept else b"",
            trajectory.logprobs if is_kept else b"",
        )
    )
