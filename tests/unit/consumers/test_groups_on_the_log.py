"""Groups from the log to their advantages: any arrival order, any cut into polls, any partitions, restarts, bad rewards."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.components import ADVANTAGES, make_recipe
from consumers.partitions import Partitions
from infra.log import Log
from infra.memory_log import MemoryLog
from schemas.codec import encode
from schemas.errors import RecordError
from schemas.records import KEPT, Finish, Outcome, Status, Trajectory
from support.processor_scenes import ROUTE, DeadlyLog, Event, append, buried, effective, filled, work_off
from support.samples import close, trajectory

Member = float | Status | None
"""A reward, or how the attempt failed; None: no reward though the attempt ended well."""
LIFETIME_MS = 5000


def _member(
    group: str, index: int, size: int, member: Member, *, at_ms: int = 1000, partition: int = 0, **changes: Any
) -> Event:
    value = member if isinstance(member, float) and math.isfinite(member) else 0.0
    fields: dict[str, Any] = {"status": member, "reward": None} if isinstance(member, Status) else {"reward": member}
    record = trajectory(
        group=group, index=index, group_size=size, partition=partition, first_request_time_ms=1000,
        lifetime_ms=LIFETIME_MS, reward_parts={"right": value}, **{**fields, **changes},
    )  # fmt: skip
    return Event(at_ms, partition, _encoded(record))


def _encoded(record: Trajectory) -> bytes:
    """As a broken foreign producer would send it: our own codec refuses a reward that is not finite."""
    if record.reward is None or math.isfinite(record.reward):
        return encode(record)
    with pytest.raises(RecordError, match="a finite number is wanted"):
        encode(record)
    stand_in = struct.pack("<d", 12345.678)
    data = encode(dataclasses.replace(record, reward=12345.678))
    assert data.count(stand_in) == 1
    return data.replace(stand_in, struct.pack("<d", record.reward))


def _group(group: str, members: Sequence[Member], *, partition: int = 0, **changes: Any) -> list[Event]:
    return [_member(group, i, len(members), m, partition=partition, **changes) for i, m in enumerate(members)]


def _partitions(log: MemoryLog | DeadlyLog, *, size: int = 4, **recipe: Any) -> Partitions:
    made = make_recipe(**{"advantage": "dr-grpo", "group_size": size, **recipe})
    return Partitions(cast("Log", log), ROUTE, made, patience_s=5.0, commit_every_s=0.0, max_tokens=4_000_000)


def _outcomes(log: MemoryLog, **recipe: Any) -> dict[str, Outcome]:
    partitions = _partitions(log, **recipe)
    work_off(partitions, log)
    partitions.discard()
    found = effective(log)
    assert len({outcome.group for outcome in found}) == len(found), "two effective outcomes of one group"
    return {outcome.group: outcome for outcome in found}


def _advantages(outcome: Outcome) -> list[float]:
    return [member.advantage for member in sorted(outcome.members, key=lambda m: m.index)]


# Groups of one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_the_only_valid_member_of_four_is_dropped_and_counted(advantage: str) -> None:
    log = filled(_group("g1", [0.7, Status.TIMEOUT, Status.ENV_ERROR, Status.GRADER_ERROR]))
    partitions = _partitions(log, advantage=advantage, min_members=2)
    work_off(partitions, log)
    (outcome,) = effective(log)
    assert (outcome.disposition, _advantages(outcome)) == ("incomplete", [0.0] * 4)
    assert partitions.metrics()["dropped:incomplete"] == 1
    partitions.discard()


def test_a_group_of_one_with_an_estimator_of_its_own_is_its_raw_reward_only_if_that_says_so() -> None:
    log = filled(_group("g1", [0.7]))
    outcomes = _outcomes(log, size=1, advantage="support.processor_components:raw")
    assert _advantages(outcomes["g1"]) == [0.7]


# Bad rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "disposition", "advantages", "num_dead"),
    [
        ([1.0, math.nan, 0.0, None], KEPT, [0.5, -0.5], 2),
        ([math.nan, math.nan, 0.3, None], "incomplete", [0.0], 3),
        ([None] * 4, None, [], 4),
        ([1.0, math.inf, 0.0, 0.0], KEPT, [2 / 3, -1 / 3, -1 / 3], 1),
        ([1.0, -math.inf, 0.0, Status.TIMEOUT], KEPT, [0.5, -0.5, 0.0], 1),
    ],
)
def test_bad_rewards_on_the_log_become_dead_letters_and_spoil_nobody(
    members: list[Member], disposition: str | None, advantages: list[float], num_dead: int
) -> None:
    """Publishing refuses them (see `_encoded`); here they stand on the log all the same."""
    closing = [Event(2000, 0, encode(close(group="g1", partition=0)))]
    good = _group("g2", [1.0, 0.25, 0.0, 0.25])
    log = filled([*_group("g1", members), *closing, *good])
    outcomes = _outcomes(log, min_members=2)
    letters = buried(log)
    assert [letter.reason for letter in letters] == ["invalid"] * len(letters)
    assert (
        len(letters) == num_dead == sum(m is None or (isinstance(m, float) and not math.isfinite(m)) for m in members)
    )
    assert outcomes.keys() == ({"g1", "g2"} if disposition else {"g2"})
    if disposition:
        assert outcomes["g1"].disposition == disposition
        assert _advantages(outcomes["g1"]) == pytest.approx(advantages)
        assert all(m.reward is None or math.isfinite(m.reward) for m in outcomes["g1"].members)
    alone = _outcomes(filled(good), min_members=2)["g2"]
    assert _advantages(outcomes["g2"]) == _advantages(alone) == [0.625, -0.125, -0.375, -0.125]
    assert [m.logprobs for m in outcomes["g2"].members] == [m.logprobs for m in alone.members]


# Uneven groups ------------------------------------------------------------------------------------------------------

UNEVEN: Mapping[str, list[float]] = {"ga": [1, 0, 1, 0], "gb": [5, 5, 5], "gc": [2, 4, 2, 4]}
CENTRED = {"ga": [0.5, -0.5, 0.5, -0.5], "gb": [0.0, 0.0, 0.0], "gc": [-1.0, 1.0, -1.0, 1.0]}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), partitions=st.integers(1, 3))
def test_uneven_groups_in_any_order_any_cut_and_any_partitions(seed: int, partitions: int) -> None:
    """All three have the same item: what tells groups apart is their id, never their prompt."""
    rng = random.Random(seed)
    by_group = [
        _group(group, list(rewards), partition=n % partitions, item=7)
        for n, (group, rewards) in enumerate(UNEVEN.items())
    ]
    events = [event for group in by_group for event in group]
    rng.shuffle(events)
    log = filled(events, partitions)
    worker = _partitions(DeadlyLog(log, rng, deadliness=0.0))  # gives 1 to 8 records a poll
    work_off(worker, log)
    worker.discard()
    outcomes = {outcome.group: outcome for outcome in effective(log)}
    assert {group: _advantages(outcome) for group, outcome in outcomes.items()} == CENTRED
    assert {outcome.disposition for outcome in outcomes.values()} == {KEPT}


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_no_estimator_sees_arrival_order_bit_for_bit(advantage: str) -> None:
    """Members are put in the order of their index first, so not even rounding tells."""
    rng = random.Random(5)
    members: list[Member] = [round(rng.random(), 3) for _ in range(7)]
    events = _group("g1", members)
    expected: list[float] = []
    for _ in range(6):
        rng.shuffle(events)
        found = _advantages(_outcomes(filled(events), size=7, advantage=advantage)["g1"])
        expected = expected or found
        assert found == expected and any(found)


def test_a_member_without_a_group_is_an_error_and_joins_nobody() -> None:
    log = filled([*_group("g1", [1.0, 0.0]), _member("", 0, 2, 9.0)])
    outcomes = _outcomes(log, size=2)
    assert outcomes.keys() == {"g1"} and _advantages(outcomes["g1"]) == [0.5, -0.5]
    assert [letter.reason for letter in buried(log)] == ["invalid"]


# Unfinished groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_members", "disposition", "advantages"), [(2, KEPT, [0.5, -0.5, 0.0]), (0, "incomplete", [0.0] * 3)]
)
@pytest.mark.parametrize("restart_after", [0, 1, 2, 3, 4, 5])
def test_a_group_that_lost_a_member_has_one_outcome_across_a_restart(
    restart_after: int, min_members: int, disposition: str, advantages: list[float]
) -> None:
    """Size 4, five seconds: three members come, the close at five seconds, the fourth member at eight."""
    events = [_member("g1", i, 4, reward, at_ms=1000 + i) for i, reward in enumerate([1.0, 0.0, 0.5])]
    events.append(Event(6000, 0, encode(close(group="g1", partition=0))))
    events.append(_member("g1", 3, 4, 1.0, at_ms=9000))
    log = filled(events[:restart_after])
    before = _partitions(log, min_members=min_members)
    work_off(before, log)
    before.discard()
    after = _partitions(log, min_members=min_members)
    append(log, events[restart_after:])
    work_off(after, log)
    (outcome,) = effective(log)
    assert (outcome.disposition, outcome.closed_by) == (disposition, "close")
    assert [member.index for member in outcome.members] == [0, 1, 2] and outcome.group_size == 4
    assert _advantages(outcome) == advantages
    counted = {
        name: before.metrics().get(name, 0.0) + after.metrics().get(name, 0.0) for name in ("late", "superseded")
    }
    assert counted["late"] == 1 and counted["superseded"] == 0  # the fourth: seen, told, and nothing opened
    assert after.metrics()["open_groups"] == after.metrics()["open_bytes"] == 0
    after.discard()


def test_baselines_are_of_all_members_before_filtering_and_of_no_stranger() -> None:
    cut: dict[str, Any] = {"status": Status.TRUNCATED, "finish": Finish.LENGTH}
    first = [_member("g1", 0, 2, 1.0, **cut), _member("g1", 1, 2, 0.0)]
    second = _group("g2", [1.0, 0.0])
    outcomes = _outcomes(filled([first[0], second[0], first[1], second[1]]), size=2, filters=["truncated"])
    assert [(m.disposition, m.advantage) for m in outcomes["g1"].members] == [("truncated", 0.0), (KEPT, -0.5)]
    assert [(m.disposition, m.advantage) for m in outcomes["g2"].members] == [(KEPT, 0.5), (KEPT, -0.5)]


@pytest.mark.parametrize(("share", "disposition"), [(0.75, KEPT), (1.0, "short-group")])
def test_short_groups_are_used_as_far_as_configured(share: float, disposition: str) -> None:
    log = filled(_group("g1", [1.0, 0.0, Status.TIMEOUT, 0.5]))
    outcomes = _outcomes(log, min_members=2, group_filters=["short-group"], settings={"short-group": {"share": share}})
    assert outcomes["g1"].disposition == disposition
    kept = disposition == KEPT
    assert _advantages(outcomes["g1"]) == ([0.5, -0.5, 0.0, 0.0] if kept else [0.0] * 4)
