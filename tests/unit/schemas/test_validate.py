"""The checks of a readable record: what is refused, why, and that nothing sound is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from schemas.codec import decode, encode
from schemas.errors import RecordError
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import (
    REWARDED,
    DeadReason,
    Member,
    Outcome,
    Role,
    Sampling,
    Segment,
    Status,
    Trajectory,
    VersionRun,
)
from schemas.validate import LOGPROB_SLACK, check_outcome, check_trajectory
from support.samples import dropped_member, member, outcome, sound_outcomes, sound_trajectories, trajectory

NAN, INF = float("nan"), float("inf")


def check(record: Trajectory | Outcome, **place: Any) -> None:
    home: dict[str, Any] = {"run": "demo", "policy": "main", "partition": 1, **place}
    if isinstance(record, Trajectory):
        check_trajectory(record, **{"max_tokens": 100, **home})
    else:
        check_outcome(record, **home)


def refusal(record: Trajectory | Outcome, **place: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        check(record, **place)
    return caught.value


@settings(max_examples=60)
@given(sound_trajectories())
def test_sound_trajectories_pass_before_and_after_the_wire(record: Trajectory) -> None:
    check(record)
    read = decode(encode(record))
    assert isinstance(read, Trajectory)
    check(read)


@settings(max_examples=30)
@given(sound_outcomes())
def test_sound_outcomes_pass_before_and_after_the_wire(record: Outcome) -> None:
    check(record)
    read = decode(encode(record))
    assert isinstance(read, Outcome)
    check(read)


@pytest.mark.parametrize("place", [{"run": "other"}, {"policy": "second"}, {"partition": 0}])
def test_a_record_in_a_wrong_place_is_refused(place: dict[str, Any]) -> None:
    for record in (trajectory(), outcome()):
        error = refusal(record, **place)
        assert error.reason == DeadReason.WRONG_PLACE
        assert str(next(iter(place.values()))) in error.detail


def test_an_unknown_status_is_never_trained() -> None:
    for reward in (0.5, None):
        assert refusal(trajectory(status=Status.UNKNOWN, reward=reward)).reason == DeadReason.UNKNOWN_STATUS
    kept = outcome(members=(member(status=Status.UNKNOWN),))
    assert refusal(kept).reason == DeadReason.UNKNOWN_STATUS


# A failure is not a reward, and a reward is a finite number


@pytest.mark.parametrize("status", [status for status in Status if status != Status.UNKNOWN])
def test_a_reward_is_there_exactly_when_the_status_may_carry_one(status: Status) -> None:
    with_reward, without = trajectory(status=status, reward=0.0), trajectory(status=status, reward=None)
    good, bad = (with_reward, without) if status in REWARDED else (without, with_reward)
    check(good)
    error = refusal(bad)
    assert error.reason == DeadReason.INVALID and "reward" in error.detail and status.value in error.detail


@pytest.mark.parametrize("reward", [NAN, INF, -INF])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    assert refusal(trajectory(reward=reward)).reason == DeadReason.INVALID
    assert refusal(trajectory(reward_parts={"digits": reward})).reason == DeadReason.INVALID
    assert refusal(trajectory(step_rewards=(0.0, reward))).reason == DeadReason.INVALID
    for changes in ({"reward": reward}, {"reward_parts": {"digits": reward}}, {"step_rewards": (0.0, reward)}):
        assert refusal(outcome(members=(member(**changes),))).reason == DeadReason.INVALID


def test_an_attempt_that_failed_before_its_first_token_is_sound() -> None:
    nothing: dict[str, Any] = {"tokens": b"", "loss_mask": b"", "logprobs": b"", "segments": (), "versions": ()}
    check(trajectory(status=Status.ENV_ERROR, reward=None, error="sandbox lost", **nothing))


# Columns. The example: 3 prompt, 2 sampled, 1 tool, 1 sampled.


def test_a_mask_may_be_thinner_than_the_sampled_tokens() -> None:
    check(trajectory(loss_mask=pack_bits([False] * 7)))
    check(trajectory(loss_mask=pack_bits([False, False, False, True, False, False, False])))


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_mask_on_a_token_that_was_not_sampled_is_refused(position: int) -> None:
    mask = [False, False, False, True, True, False, True]
    mask[position] = True
    error = refusal(trajectory(loss_mask=pack_bits(mask)))
    assert f"position {position} " in error.detail


def test_a_mask_of_another_length_is_refused() -> None:
    error = refusal(trajectory(loss_mask=pack_bits([False] * 9)))
    assert error.reason == DeadReason.INVALID and "loss_mask: got 2 bytes" in error.detail
    assert "position 7 " in refusal(trajectory(loss_mask=b"\x80")).detail  # behind the last token


WRONG: dict[str, dict[str, Any]] = {
    "tokens cut": {"tokens": pack_ints([5, 260, 151643, 7, 8, 9, 2])[:-1]},
    "tokens and a byte": {"tokens": pack_ints([5, 260, 151643, 7, 8, 9, 2]) + b"\x00"},
    "tokens short": {"tokens": pack_ints([5, 260, 151643, 7, 8, 9])},
    "token negative": {"tokens": pack_ints([5, 260, -1, 7, 8, 9, 2])},
    "logprobs short": {"logprobs": pack_floats([-0.5, -1.25])},
    "logprobs for every token": {"logprobs": pack_floats([-0.5] * 7)},
    "logprob nan": {"logprobs": pack_floats([-0.5, NAN, -1.0])},
    "logprob minus infinity": {"logprobs": pack_floats([-0.5, -INF, -1.0])},
    "logprob infinity": {"logprobs": pack_floats([-0.5, INF, -1.0])},
    "logprob above 0": {"logprobs": pack_floats([-0.5, 2 * LOGPROB_SLACK, -1.0])},
    "segments short": {"segments": (Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, 3))},
    "segment empty": {
        "segments": (
            Segment(Role.PROMPT, 3),
            Segment(Role.SAMPLED, 2),
            Segment(Role.TOOL, 1),
            Segment(Role.SAMPLED, 1),
            Segment(Role.TOOL, 0),
        )
    },
    "segment negative": {"segments": (Segment(Role.PROMPT, 8), Segment(Role.SAMPLED, -1))},
    "versions short": {"versions": (VersionRun(1, 6, 2),)},
    "versions for every token": {"versions": (VersionRun(1, 6, 7),)},
    "version run empty": {"versions": (VersionRun(1, 6, 3), VersionRun(1, 7, 0))},
    "version negative": {"versions": (VersionRun(1, -1, 3),)},
    "epoch negative": {"versions": (VersionRun(-1, 6, 3),)},
}
"""What contradicts itself, in a trajectory and in a kept member alike."""


@pytest.mark.parametrize("name", WRONG)
def test_columns_that_contradict_each_other_are_refused(name: str) -> None:
    field = next(iter(WRONG[name]))
    for record in (trajectory(**WRONG[name]), outcome(members=(member(**WRONG[name]),))):
        error = refusal(record)
        assert error.reason == DeadReason.INVALID
        assert field in error.detail or "segments" in error.detail


def test_arithmetic_slack_above_zero_is_allowed() -> None:
    check(trajectory(logprobs=pack_floats([LOGPROB_SLACK / 2, -1.0, 0.0])))


FIELDS: dict[str, list[Any]] = {
    "index": [-1, 8],
    "group_size": [0],
    "attempt": [-1],
    "item": [-1],
    "seed": [-1],
    "lifetime_ms": [-1],
    "first_request_time_ms": [-1],
    "group": [""],
    "timings": [{"sample": NAN}],
    "sampling": [
        Sampling(temperature=0.0),
        Sampling(temperature=-1.0),
        Sampling(temperature=NAN),
        Sampling(temperature=INF),
        Sampling(top_p=0.0),
        Sampling(top_p=1.5),
        Sampling(top_k=-1),
        Sampling(min_p=-0.1),
        Sampling(min_p=NAN),
        Sampling(max_tokens=0),
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(trajectory(**{name: value}))
    assert error.reason == DeadReason.INVALID and error.detail.startswith(name)


def test_more_tokens_than_allowed_are_refused() -> None:
    check(trajectory(), max_tokens=7)
    assert "7 tokens" in refusal(trajectory(), max_tokens=6).detail


# Outcomes


def test_an_outcome_that_was_dropped_needs_no_payload() -> None:
    check(outcome(disposition="zero-spread", oldest_version=-1, members=(stripped(), dropped_member())))
    check(outcome(disposition="empty", oldest_version=-1, members=()))


def stripped() -> Member:
    return member(disposition="zero-spread", tokens=b"", loss_mask=b"", logprobs=b"", segments=(), versions=())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"members": (dropped_member(),)}, "disposition"),
        ({"members": (member(), member())}, "index 3 twice"),
        ({"members": (member(index=8),)}, "index"),
        ({"members": (member(advantage=NAN),)}, "advantage"),
        ({"members": (member(temperature=0.0),)}, "temperature"),
        ({"members": (member(num_tokens=8),)}, "num_tokens"),
        ({"members": (member(num_sampled=2),)}, "num_sampled"),
        ({"members": (member(status=Status.TIMEOUT, reward=None),)}, "status"),
        ({"members": (member(status=Status.TIMEOUT),)}, "reward"),
        ({"oldest_version": 7}, "oldest_version"),
        ({"oldest_version": -1}, "oldest_version"),
        ({"previous": -2}, "previous"),
        ({"previous": 121}, "closing_offset"),
        ({"group": ""}, "group"),
        ({"group_size": 0, "disposition": "empty", "members": ()}, "group_size"),
    ],
)
def test_an_outcome_that_contradicts_itself_is_refused(changes: dict[str, Any], word: str) -> None:
    error = refusal(outcome(**changes))
    assert error.reason == DeadReason.INVALID and word in error.detail


def test_a_kept_member_has_sampled_tokens() -> None:
    nothing: dict[str, Any] = {
        "segments": (Segment(Role.PROMPT, 7),),
        "loss_mask": pack_bits([False] * 7),
        "logprobs": b"",
        "versions": (),
        "num_sampled": 0,
    }
    assert "num_sampled" in refusal(outcome(members=(member(**nothing),))).detail


def test_whoever_checked_the_members_may_leave_their_columns_out_and_nothing_else() -> None:
    broken = replace(member(), tokens=b"\x00" * 3)
    place: dict[str, Any] = {"run": "demo", "policy": "main", "partition": 1}
    sound = outcome()
    others = tuple(one for one in sound.members if one.index != broken.index)
    check_outcome(replace(sound, members=(broken, *others)), **place, columns=False)
    refusal(replace(sound, members=(broken, *others)))
    changes: list[dict[str, Any]] = [{"advantage": NAN}, {"reward": None}, {"temperature": 0.0}, {"num_sampled": 0}]
    for change in [*changes, {"index": 99}]:
        with pytest.raises(RecordError):
            check_outcome(replace(sound, members=(replace(member(), **change), *others)), **place, columns=False)


@pytest.mark.parametrize("size", [3, 4096, 4097])
@pytest.mark.parametrize("bad", [INF, -INF, NAN, -NAN, 1.0, 2 * LOGPROB_SLACK, 3e38])
def test_bad_logprobs_are_found_in_short_and_long_sequences(size: int, bad: float) -> None:
    values = np.full(size, -3e38, dtype=np.float32)  # the largest top byte that may be good
    values[: size // 2] = LOGPROB_SLACK / 2
    columns: dict[str, Any] = {
        "tokens": pack_ints([2**31 - 1] * size),
        "loss_mask": pack_bits([True] * size),
        "segments": (Segment(Role.SAMPLED, size),),
        "versions": (VersionRun(1, 1, size),),
    }
    check(trajectory(**{**columns, "logprobs": pack_floats(values)}), max_tokens=5000)
    values[size - 1] = bad
    assert "logprobs" in refusal(trajectory(**{**columns, "logprobs": pack_floats(values)}), max_tokens=5000).detail
    values[size - 1] = 0.0
    columns["tokens"] = pack_ints([*[7] * (size - 1), -1])
    assert "token id -1" in refusal(trajectory(**{**columns, "logprobs": pack_floats(values)}), max_tokens=5000).detail
