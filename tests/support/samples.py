"""Example records and hypothesis strategies, one of each for every record type.

`trajectory(status=Status.TIMEOUT, ...)` and its siblings give a sound record with the named fields changed; EXAMPLES holds
one fixed record of each type (the golden bytes are theirs); RECORDS holds a strategy for each type, of everything that
the wire can carry; `sound_trajectories` and `sound_outcomes` pass `schemas.validate` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import (
    KEPT,
    REWARDED,
    Address,
    Announcement,
    Claim,
    Close,
    DeadLetter,
    DeadReason,
    Eval,
    Finish,
    Heartbeat,
    Member,
    Outcome,
    Partial,
    Plan,
    PlanDrop,
    Record,
    Request,
    Result,
    Role,
    Sampling,
    SchemaText,
    Segment,
    State,
    Status,
    Trajectory,
    Turn,
    VersionRun,
)

MASK = (False, False, False, True, True, False, True)
SEGMENTS = (
    Segment(Role.PROMPT, 3),
    Segment(Role.SAMPLED, 2),
    Segment(Role.TOOL, 1),
    Segment(Role.SAMPLED, 1),
)
COLUMNS: Mapping[str, Any] = {
    "versions": (VersionRun(1, 6, 2), VersionRun(1, 7, 1)),
    "segments": SEGMENTS,
    "tokens": pack_ints([5, 260, 151643, 7, 8, 9, 2]),
    "loss_mask": pack_bits(MASK),
    "logprobs": pack_floats([-0.5, -1.25, 0.0]),
}
"""Seven tokens, three of them sampled, by two sets of weights."""


def request(**changes: Any) -> Request:
    """The first request of member 3 of a group of 8."""
    record = Request(
        run="demo", policy="main", epoch=1, nonce="0a1b2c3d", group="g00000042", group_size=8, index=3, attempt=0,
        partition=1, task="sort-digits", environment="sort-digits", item=42, payload='{"digits": "3142"}', seed=2**62 + 5,
        sampling=Sampling(max_tokens=32), min_version=6, lifetime_ms=120_000, first_request_time_ms=0, worker="w0",
        session="1234abcd",
    )  # fmt: skip
    return replace(record, **changes)


def trajectory(**changes: Any) -> Trajectory:
    """A finished attempt with two turns and a tool between them."""
    record = Trajectory(
        run="demo", policy="main", group="g00000042", group_size=8, index=3, attempt=0, partition=1, task="sort-digits",
        environment="sort-digits", item=42, seed=2**62 + 5, first_request_time_ms=1_790_000_000_000, lifetime_ms=120_000,
        sampling=Sampling(max_tokens=32), model="tiny", tokenizer="ab" * 32, status=Status.OK, finish=Finish.STOP,
        reward=0.75, reward_parts={"digits": 0.5, "format": 0.25}, step_rewards=(0.0, 0.75), worker="w0",
        session="1234abcd", region="here", timings={"queue": 0.25, "sample": 1.5}, old_kv=True, **COLUMNS,
    )  # fmt: skip
    return replace(record, **changes)


def partial(**changes: Any) -> Partial:
    """The first chunk of that attempt: its first turn is over, its second has one token so far."""
    record = Partial(
        run="demo", policy="main", group="g00000042", index=3, attempt=0, partition=1, worker="w0", session="1234abcd",
        start=0, old_kv=True, turns=(Turn(5, Finish.STOP),), **COLUMNS,
    )  # fmt: skip
    return replace(record, **changes)


def close(**changes: Any) -> Close:
    """A close record for that group."""
    record = Close(
        run="demo", policy="main", epoch=1, nonce="0a1b2c3d", group="g00000042", partition=1, reason="lifetime"
    )
    return replace(record, **changes)


def member(**changes: Any) -> Member:
    """A kept member."""
    record = Member(
        index=3, attempt=0, offset=117, status=Status.OK, disposition=KEPT, reward=0.75, reward_parts={"digits": 0.5},
        step_rewards=(0.0, 0.75), advantage=0.5, num_tokens=7, num_sampled=3, temperature=1.0, old_kv=True, **COLUMNS,
    )  # fmt: skip
    return replace(record, **changes)


def dropped_member(**changes: Any) -> Member:
    """A member whose grader failed: no reward, no payload."""
    record = Member(
        index=5, attempt=1, offset=119, status=Status.GRADER_ERROR, disposition="grader_error", reward=None,
        num_tokens=7, num_sampled=3, temperature=1.0,
    )  # fmt: skip
    return replace(record, **changes)


def outcome(**changes: Any) -> Outcome:
    """A kept group of eight of which two came."""
    record = Outcome(
        run="demo", policy="main", source_run="demo", source_policy="main", partition=1, group="g00000042", group_size=8,
        task="sort-digits", environment="sort-digits", item=42, closing_offset=121, previous=104,
        closing_time_ms=1_790_000_009_000, lifetime_ms=120_000, closed_by="close", disposition=KEPT, oldest_version=6,
        members=(member(), dropped_member()),
    )  # fmt: skip
    return replace(record, **changes)


def claim(**changes: Any) -> Claim:
    """A trainer's claim."""
    record = Claim(run="demo", policy="main", role="train", epoch=2, nonce="0a1b2c3d", head_epoch=1, head_version=31)
    return replace(record, **changes)


def plan(**changes: Any) -> Plan:
    """A plan of two outcomes and one drop."""
    record = Plan(
        run="demo", policy="main", epoch=2, nonce="0a1b2c3d", step=31, samples=(Address(0, 12, 90, 8), Address(1, 15, 121, 2)),
        drops=(PlanDrop(1, 14, 104, 8, "too-old", 5),), max_age=4, seed=7, config_digest="cd" * 32, num_tokens=2718,
    )  # fmt: skip
    return replace(record, **changes)


def result(**changes: Any) -> Result:
    """The result of that plan."""
    record = Result(
        run="demo", policy="main", epoch=2, nonce="0a1b2c3d", step=31, version=32, digest="ef" * 32,
        metrics={"loss": -0.125, "clip_fraction": 0.0},
    )  # fmt: skip
    return replace(record, **changes)


def announcement(**changes: Any) -> Announcement:
    """Version 32 is in the store."""
    record = Announcement(
        run="demo", policy="main", epoch=2, nonce="0a1b2c3d", version=32, manifest_key="demo/main/manifests/2-32.json",
        manifest_digest="01" * 32, size_bytes=1_234_567,
    )  # fmt: skip
    return replace(record, **changes)


def dead_letter(**changes: Any) -> DeadLetter:
    """Two bytes that are no record."""
    record = DeadLetter(
        run="demo", policy="main", topic="demo.main.trajectories", partition=1, offset=118, time_ms=1_790_000_001_000,
        reason=DeadReason.NOT_OURS.value, detail="starts with 00ff", key=None, value=b"\x00\xff", headers=(("origin", b"w9"),),
    )  # fmt: skip
    return replace(record, **changes)


def heartbeat(**changes: Any) -> Heartbeat:
    """A rollout worker that serves."""
    record = Heartbeat(
        run="demo", policy="main", role="rollout", name="w0", session="1234abcd", state=State.SERVING, region="here", inbox=0,
        capacity=64, running=12, epoch=2, version=31, metrics={"tokens_per_s": 1500.0}, labels={"engine": "vllm"},
    )  # fmt: skip
    return replace(record, **changes)


def schema_text(**changes: Any) -> SchemaText:
    """A writer's schema."""
    record = SchemaText(name="offsetrl.v1.Close", fingerprint="0123456789abcdef", text='{"type": "record"}')
    return replace(record, **changes)


def evaluation(**changes: Any) -> Eval:
    """An evaluation of version 32."""
    record = Eval(
        run="demo", policy="main", epoch=2, version=32, task="sort-digits", environment="sort-digits", split="held-out",
        num_episodes=64, num_failed=2, mean_reward=0.5, low=0.375, high=0.625, metrics={"truncated": 0.0},
    )  # fmt: skip
    return replace(record, **changes)


_ALL: tuple[Record, ...] = (
    request(resume=(40, 44)),
    trajectory(resumed_tokens=2),
    partial(),
    close(),
    outcome(),
    claim(),
    plan(),
    result(),
    announcement(),
    dead_letter(),
    heartbeat(),
    schema_text(),
    evaluation(),
)
EXAMPLES: Mapping[type[Any], Record] = {type(record): record for record in _ALL}

_INTS = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(max_size=12)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_METRICS = st.floats(allow_nan=False)
_BYTES = st.binary(max_size=40)
_REWARD = st.none() | _FINITE
_PARTS = st.dictionaries(_TEXT, _FINITE, max_size=3)
_MEASURES = st.dictionaries(_TEXT, _METRICS, max_size=3)
_STEP_REWARDS = st.lists(_FINITE, max_size=3).map(tuple)
_VERSIONS = st.lists(st.builds(VersionRun, _INTS, _INTS, _INTS), max_size=3).map(tuple)
_INT32 = st.integers(-(2**31), 2**31 - 1)
_ROLES = st.sampled_from([role for role in Role if role != Role.UNKNOWN])
_SEGMENTS = st.lists(st.builds(Segment, _ROLES, _INT32), max_size=3).map(tuple)
_SAMPLING = st.builds(Sampling, temperature=_FINITE, top_p=_FINITE, top_k=_INTS, min_p=_FINITE, max_tokens=_INTS)
_ADDRESS = st.builds(Address, _INTS, _INTS, _INTS, _INTS)
_TURN = st.builds(Turn, _INTS, st.sampled_from(Finish))
_DROP = st.builds(PlanDrop, _INTS, _INTS, _INTS, _INTS, _TEXT, _INTS)
_BY_TYPE: Mapping[str, st.SearchStrategy[Any]] = {
    "str": _TEXT, "int": _INTS, "float": _FINITE, "bool": st.booleans(), "bytes": _BYTES, "bytes | None": st.none() | _BYTES,
    "float | None": _REWARD, "Sampling": _SAMPLING, "Status": st.sampled_from(Status), "Finish": st.sampled_from(Finish),
    "State": st.sampled_from(State), "Mapping[str, float]": _PARTS,
    "Mapping[str, str]": st.dictionaries(_TEXT, _TEXT, max_size=3), "tuple[float, ...]": _STEP_REWARDS,
    "tuple[VersionRun, ...]": _VERSIONS, "tuple[Segment, ...]": _SEGMENTS,
    "tuple[int, ...]": st.lists(_INTS, max_size=3).map(tuple), "tuple[Turn, ...]": st.lists(_TURN, max_size=3).map(tuple),
    "tuple[Address, ...]": st.lists(_ADDRESS, max_size=3).map(tuple),
    "tuple[PlanDrop, ...]": st.lists(_DROP, max_size=3).map(tuple),
    "tuple[tuple[str, bytes], ...]": st.lists(st.tuples(_TEXT, _BYTES), max_size=3).map(tuple),
}  # fmt: skip


def _strategy(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Every field filled by its annotation, as written in the records file."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, hint in cls.__annotations__.items():
        if hint == "tuple[Member, ...]":
            fields[name] = st.lists(_strategy(Member), max_size=3).map(tuple)
        else:
            fields[name] = _MEASURES if name == "metrics" else _BY_TYPE[hint]
    return st.builds(cls, **fields)


RECORDS: Mapping[type[Any], st.SearchStrategy[Any]] = {cls: _strategy(cls) for cls in EXAMPLES}


@st.composite
def columns(draw: st.DrawFn, min_sampled: int = 0) -> dict[str, Any]:
    """Segments, version runs and packed columns that agree."""
    segments = draw(st.lists(st.builds(Segment, _ROLES, st.integers(1, 9)), max_size=5))
    if min_sampled:
        segments.append(Segment(Role.SAMPLED, min_sampled))
    sampled = np.array([segment.role == Role.SAMPLED for segment in segments for _ in range(segment.count)], dtype=bool)
    num_tokens, num_sampled = len(sampled), int(sampled.sum())
    versions: list[VersionRun] = []
    left = num_sampled
    while left:
        count = draw(st.integers(1, left))
        versions.append(VersionRun(1, draw(st.integers(0, 9)), count))
        left -= count
    chosen = np.array(draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=bool)
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens)
    logprobs = st.lists(st.floats(-50, 0, width=32), min_size=num_sampled, max_size=num_sampled)
    return {
        "segments": tuple(segments),
        "versions": tuple(versions),
        "tokens": pack_ints(draw(ids)),
        "loss_mask": pack_bits(chosen & sampled),
        "logprobs": pack_floats(draw(logprobs)),
    }


@st.composite
def sound_trajectories(draw: st.DrawFn) -> Trajectory:
    """Trajectories of demo/main, partition 1, that pass `check_trajectory`."""
    status = draw(st.sampled_from([status for status in Status if status != Status.UNKNOWN]))
    size = draw(st.integers(1, 8))
    return trajectory(
        status=status,
        reward=draw(_FINITE) if status in REWARDED else None,
        group_size=size,
        index=draw(st.integers(0, size - 1)),
        **draw(columns()),
    )


@st.composite
def sound_outcomes(draw: st.DrawFn) -> Outcome:
    """Kept outcomes of demo/main, partition 1, that pass `check_outcome`."""
    members = []
    for index in range(draw(st.integers(1, 4))):
        parts = draw(columns(min_sampled=1))
        num_sampled = sum(segment.count for segment in parts["segments"] if segment.role == Role.SAMPLED)
        members.append(member(index=index, num_tokens=len(parts["tokens"]) // 4, num_sampled=num_sampled, **parts))
    oldest = min(run.version for one in members for run in one.versions)
    return outcome(members=(*members, dropped_member()), oldest_version=oldest)
