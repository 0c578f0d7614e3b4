"""Strict writes: whatever a schema cannot hold fails before anything is sent, naming its field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from schemas import codec
from schemas.codec import encode
from schemas.errors import RecordError
from schemas.records import (
    Address,
    DeadReason,
    Sampling,
    Segment,
    Status,
    Trajectory,
)
from support.samples import heartbeat, member, outcome, plan, request, trajectory


def unfit(record: Any) -> str:
    with pytest.raises(RecordError) as caught:
        encode(record)
    assert caught.value.reason == DeadReason.INVALID
    return caught.value.detail


def test_a_misspelt_field_fails_by_name() -> None:
    values = {field.name: getattr(trajectory(), field.name) for field in fields(Trajectory)}
    with pytest.raises(TypeError, match="rewrad"):
        Trajectory(**{**values, "rewrad": 1.0})
    del values["reward"]
    with pytest.raises(TypeError, match="reward"):
        Trajectory(**values)


CHANGES: Mapping[str, Any] = {
    "run": 3,
    "group": b"g1",
    "index": True,
    "attempt": 1.0,
    "partition": "1",
    "seed": 2**63,
    "item": -(2**63) - 1,
    "sampling": {"temperature": 1.0},
    "status": "ok",
    "finish": Status.OK,
    "reward": "0.5",
    "reward_parts": {"digits": "1"},
    "timings": {1: 1.0},
    "step_rewards": [0.5],
    "error": None,
    "region": "\ud800",
    "old_kv": 1,
    "versions": ((1, 2, 3),),
    "segments": (Segment("sampeld", 3),),  # type: ignore[arg-type]
    "tokens": bytearray(4),
    "loss_mask": None,
    "logprobs": "0000",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_value_fails_naming_its_field(name: str) -> None:
    detail = unfit(trajectory(**{name: CHANGES[name]}))
    assert f"Trajectory.{name}: got {type(CHANGES[name]).__name__} " in detail


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["reward", "reward_parts", "step_rewards", "timings", "sampling"])
def test_a_number_that_is_not_finite_fails_naming_its_field(name: str, bad: float) -> None:
    value: Any = {
        "reward": bad,
        "reward_parts": {"digits": bad},
        "step_rewards": (0.0, bad),
        "timings": {"sample": bad},
        "sampling": Sampling(temperature=bad),
    }[name]
    assert f"Trajectory.{name}: " in unfit(trajectory(**{name: value}))


def test_a_wrong_value_deep_inside_is_named_with_its_way() -> None:
    detail = unfit(outcome(members=(member(), member(index=4, advantage=float("nan")))))
    assert "Outcome.members: " in detail and "Member.advantage: " in detail
    assert "Sampling.top_k: " in unfit(request(sampling=Sampling(top_k=2**70)))
    assert "Address.offset: " in unfit(plan(samples=(Address(0, 1.5, 2, 3),)))  # type: ignore[arg-type]


def test_what_fails_once_still_fails_after_a_good_record() -> None:
    encode(trajectory())
    assert "Trajectory.index" in unfit(trajectory(index=True))
    encode(trajectory(reward=None))
    assert "Trajectory.reward" in unfit(trajectory(reward=True))


def test_only_records_are_written() -> None:
    with pytest.raises(TypeError, match="dict is no record"):
        encode({"run": "demo"})  # type: ignore[arg-type]


def test_a_record_that_could_not_be_read_is_not_written() -> None:
    detail = unfit(heartbeat(metrics={f"{n:08d}": 0.0 for n in range(codec.MAX_ITEMS + 1)}, labels={}))
    assert "100000" in detail
    encode(heartbeat(metrics={f"{n:08d}": 0.0 for n in range(codec.MAX_ITEMS)}, labels={}))
