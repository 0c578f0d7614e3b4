"""The codec: round trips, strict writes, hostile reads, and schemas of other writers."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import fastavro
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import codec
from schemas.codec import SCHEMAS, decode, encode, fingerprint, kind, register_writer, schema_text
from schemas.errors import RecordError
from schemas.records import (
    Address,
    Close,
    DeadLetter,
    DeadReason,
    Heartbeat,
    Outcome,
    Record,
    Role,
    Sampling,
    Segment,
    Status,
    Trajectory,
    VersionRun,
)
from schemas.scan import scanner
from schemas.wire import pack_segments, unpack_segments
from support.samples import EXAMPLES, RECORDS, heartbeat, member, outcome, plan, request, trajectory

TYPES = list(EXAMPLES)
each_type = pytest.mark.parametrize("cls", TYPES, ids=lambda cls: str(cls.__name__))


def refusal(data: bytes | None) -> RecordError:
    with pytest.raises(RecordError) as caught:
        decode(data)
    return caught.value


def unfit(record: Any) -> str:
    with pytest.raises(RecordError) as caught:
        encode(record)
    assert caught.value.reason == DeadReason.INVALID
    return caught.value.detail


# Round trips


@each_type
def test_what_is_written_is_read(cls: type[Any]) -> None:
    @settings(max_examples=60)
    @given(RECORDS[cls])
    def check(record: Record) -> None:
        data = encode(record)
        assert decode(data) == record
        assert kind(data) is cls

    check()


@each_type
def test_our_bytes_are_what_fastavro_writes(cls: type[Any]) -> None:
    schema = fastavro.parse_schema(json.loads(schema_text(cls)))

    @settings(max_examples=30)
    @given(RECORDS[cls])
    def check(record: Record) -> None:
        data = encode(record)
        datum = fastavro.schemaless_reader(io.BytesIO(data[10:]), schema, None)
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, datum, strict=True)
        assert buffer.getvalue() == data[10:]

    check()


def test_types_come_back_as_they_went() -> None:
    record = decode(encode(trajectory(reward=1, step_rewards=(1, 0))))
    assert isinstance(record, Trajectory)
    assert isinstance(record.status, Status) and isinstance(record.sampling, Sampling)
    assert type(record.reward) is float and list(map(type, record.step_rewards)) == [float, float]
    assert type(record.versions[0]) is VersionRun and type(record.segments[0]) is Segment
    assert isinstance(record.segments[0].role, Role)
    read = decode(encode(plan()))
    assert type(read) is type(plan()) and type(read.samples[0]) is Address


def test_a_mapping_that_is_no_dict_and_a_string_enum_are_written() -> None:
    record = replace(trajectory(), timings=MappingProxyType({"queue": 0.25}))
    assert decode(encode(record)) == replace(record, timings={"queue": 0.25})
    letter = EXAMPLES[DeadLetter]
    assert isinstance(letter, DeadLetter)
    assert decode(encode(replace(letter, reason=DeadReason.EMPTY))) == replace(letter, reason="empty")


def test_metrics_may_be_nan_or_infinite() -> None:
    read = decode(encode(heartbeat(metrics={"a": float("nan"), "b": float("inf")})))
    assert isinstance(read, Heartbeat)
    assert read.metrics["a"] != read.metrics["a"] and read.metrics["b"] == float("inf")


# Header


def test_the_header_is_marker_and_little_endian_fingerprint() -> None:
    data = encode(trajectory())
    assert data[:2] == b"\xc3\x01"
    assert data[2:10] == fingerprint(Trajectory)


def test_the_fingerprint_is_crc_64_avro() -> None:
    def table(byte: int) -> int:
        for _ in range(8):
            byte = (byte >> 1) ^ (0xC15D213AA4D7A795 & -(byte & 1))
        return byte

    def crc(text: str) -> int:
        value = 0xC15D213AA4D7A795
        for byte in text.encode():
            value = (value >> 8) ^ table((value ^ byte) & 0xFF)
        return value

    assert crc('"null"') == 0x63DD24E7CC258F8A  # the specification's own example
    canonical = fastavro.schema.to_parsing_canonical_form(json.loads(schema_text(Close)))
    assert fingerprint(Close) == crc(canonical).to_bytes(8, "little")


def test_every_type_has_a_fingerprint_of_its_own() -> None:
    assert len({fingerprint(cls) for cls in TYPES}) == len(TYPES) == len(SCHEMAS)


def test_kind_is_none_for_what_is_not_ours() -> None:
    for data in (None, b"", b"\xc3\x01", b"\x00\xff", b"\xc3\x01" + bytes(8)):
        assert kind(data) is None


# Reading what is no record (O10)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, DeadReason.EMPTY),
        (b"", DeadReason.EMPTY),
        (b"\x00\xff", DeadReason.NOT_OURS),
        (b"\xc3", DeadReason.NOT_OURS),
        (b"\xc3\x01\x00", DeadReason.NOT_OURS),
        (encode(trajectory())[10:], DeadReason.NOT_OURS),
        (b"\xc3\x01" + bytes(8) + b"body", DeadReason.UNKNOWN_SCHEMA),
        (encode(trajectory())[:10], DeadReason.UNDECODABLE),
        (encode(trajectory())[:-1], DeadReason.UNDECODABLE),
        (encode(trajectory()) + b"\x00", DeadReason.UNDECODABLE),
    ],
)
def test_what_cannot_be_read_has_its_reason(data: bytes | None, reason: str) -> None:
    assert refusal(data).reason == reason


def test_bytes_left_over_are_counted() -> None:
    assert "3 bytes are left over" in refusal(encode(trajectory()) + b"abc").detail


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), st.binary(max_size=5)), min_size=1),
)
def test_changed_bytes_give_a_record_or_a_record_error(cls: type[Any], changes: list[tuple[int, int, bytes]]) -> None:
    data = bytearray(encode(EXAMPLES[cls]))
    for where, how, new in changes:
        at = 10 + where % max(1, len(data) - 10)
        data[at : at + (how and len(new))] = new if how < 2 else b""
    try:
        record = decode(bytes(data))
    except RecordError as error:
        assert error.reason in set(DeadReason)
    else:
        assert type(record) is cls
        encode(record)


@settings(max_examples=200)
@given(st.sampled_from(TYPES), st.binary(max_size=200))
@example(Trajectory, b"")
def test_any_bytes_after_a_header_give_a_record_or_a_record_error(cls: type[Any], body: bytes) -> None:
    try:
        decode(codec.MARKER + fingerprint(cls) + body)
    except RecordError as error:
        assert error.reason == DeadReason.UNDECODABLE


def long_of(value: int) -> bytes:
    rest, out = (value << 1) ^ (value >> 63), b""
    while rest > 127:
        out += bytes([rest & 127 | 128])
        rest >>= 7
    return out + bytes([rest])


HOSTILE = {
    "text of 2^62 bytes": long_of(1 << 62),
    "text of negative size": long_of(-5) + b"xxxx",
    "number of 20 bytes": b"\x80" * 20 + b"\x01",
    "all ones": b"\xff" * 64,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes_are_refused_at_once(name: str) -> None:
    started_s = time.process_time()
    for cls in TYPES:
        assert refusal(codec.MARKER + fingerprint(cls) + HOSTILE[name]).reason == DeadReason.UNDECODABLE
    assert time.process_time() - started_s < 5  # a hang, not a speed


@pytest.mark.parametrize("count", [1 << 31, 1 << 40, -(1 << 40)])
def test_a_hostile_count_is_refused_at_once(count: int) -> None:
    data = encode(heartbeat(metrics={}, labels={}))
    assert data[-2:] == b"\x00\x00"
    started_s = time.process_time()
    assert refusal(data[:-2] + long_of(count)).reason == DeadReason.UNDECODABLE
    assert time.process_time() - started_s < 5


def test_a_record_of_a_million_small_items_is_refused_before_it_is_decoded() -> None:
    data = encode(heartbeat(metrics={}, labels={}))
    many = 1_000_000
    pairs = b"".join(b"\x06" + (b"%03x" % (n % 4096)) + bytes(8) for n in range(many))
    error = refusal(data[:-2] + long_of(many) + pairs + b"\x00\x00")
    assert error.reason == DeadReason.UNDECODABLE
    assert "100000" in error.detail


def test_a_record_that_could_not_be_read_is_not_written() -> None:
    detail = unfit(heartbeat(metrics={f"{n:08d}": 0.0 for n in range(codec.MAX_ITEMS + 1)}, labels={}))
    assert "100000" in detail
    encode(heartbeat(metrics={f"{n:08d}": 0.0 for n in range(codec.MAX_ITEMS)}, labels={}))


def test_a_large_good_record_passes_the_scan() -> None:
    record = trajectory(tokens=os.urandom(4 * 100_000))
    assert len(encode(record)) > codec.SCAN_FROM_BYTES
    assert decode(encode(record)) == record


# Strict writes (O02)


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


# Other writers (O01)


def other_writer(cls: type[Any], **changes: Any) -> str:
    """The schema of another version: fields' specs replaced, added, or (None) left out."""
    tree = json.loads(schema_text(cls))
    specs = {field["name"]: field for field in tree["fields"]} | changes
    tree["fields"] = [field for field in specs.values() if field is not None]
    return json.dumps(tree)


def write_as(text: str, record: Record, **changes: Any) -> bytes:
    """A record as that writer writes it."""
    ours = fastavro.parse_schema(json.loads(schema_text(type(record))))
    theirs = fastavro.parse_schema(json.loads(text))
    datum = fastavro.schemaless_reader(io.BytesIO(encode(record)[10:]), ours, None)
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, theirs, {**datum, **changes})
    return codec.MARKER + register_writer(text) + buffer.getvalue()


def status_with(symbols: list[str]) -> dict[str, Any]:
    kind = {"type": "enum", "name": "Status", "symbols": symbols, "default": symbols[-1]}
    return {"name": "status", "type": kind}


def test_an_unknown_symbol_is_read_as_unknown() -> None:
    symbols = [*(status.value for status in Status), "melted"]
    data = write_as(other_writer(Trajectory, status=status_with(symbols)), trajectory(), status="melted")
    assert decode(data) == trajectory(status=Status.UNKNOWN)


def test_the_order_of_symbols_changes_nothing() -> None:
    symbols = [status.value for status in reversed(Status)]
    text = other_writer(Trajectory, status=status_with(symbols))
    for status in Status:
        assert decode(write_as(text, trajectory(status=status), status=status.value)) == trajectory(status=status)


def test_an_unknown_role_is_read_as_unknown() -> None:
    data = pack_segments((Segment(Role.TOOL, 3),)).replace(b"\x02", b"\x09")
    assert unpack_segments(data) == (Segment(Role.UNKNOWN, 3),)
    record = trajectory(segments=(Segment(Role.UNKNOWN, 3),))
    assert decode(encode(record)) == record


def test_a_new_field_is_passed_over() -> None:
    text = other_writer(Close, colour={"name": "colour", "type": "string"})
    record = EXAMPLES[Close]
    data = write_as(text, record, colour="red")
    assert decode(data) == record
    assert kind(data) is Close


def test_a_field_without_default_that_its_writer_lacks_is_refused_by_name() -> None:
    error = refusal(write_as(other_writer(Close, reason=None), EXAMPLES[Close]))
    assert error.reason == DeadReason.UNDECODABLE
    assert "reason" in error.detail


def test_another_writers_types_never_come_through() -> None:
    instant = {"name": "partition", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    assert decode(write_as(other_writer(Close, partition=instant), EXAMPLES[Close])) == EXAMPLES[Close]
    amount = {"name": "reason", "type": {"type": "bytes", "logicalType": "decimal", "precision": 3}}
    error = refusal(write_as(other_writer(Close, reason=amount), EXAMPLES[Close], reason=b"\x01"))
    assert error.reason == DeadReason.UNDECODABLE and "reason" in error.detail


def test_a_narrower_number_is_widened() -> None:
    text = other_writer(Close, partition={"name": "partition", "type": "int"})
    assert decode(write_as(text, EXAMPLES[Close])) == EXAMPLES[Close]


def test_registering_twice_is_nothing() -> None:
    text = other_writer(Close, twice={"name": "twice", "type": "long"})
    assert register_writer(text) == register_writer(text) != fingerprint(Close)
    assert register_writer(schema_text(Close)) == fingerprint(Close)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '"string"',
        '{"type": "record", "name": "offsetrl.v0.Nobody", "fields": []}',
        other_writer(Close, bomb={"name": "bomb", "type": {"type": "array", "items": "null"}}),
        other_writer(
            Close, bomb={"name": "bomb", "type": {"type": "array", "items": {"type": "fixed", "name": "Z", "size": 0}}}
        ),
        other_writer(Close, bomb={"name": "bomb", "type": ["null", "offsetrl.v0.Close"]}),
        other_writer(Close, bomb={"name": "bomb", "type": ["null", "Close"]}),
        other_writer(Close, bomb={"name": "bomb", "type": "nobody"}),
        other_writer(Close, long={"name": "long", "type": "string", "doc": "x" * 300_000}),
    ],
)
def test_a_dangerous_or_foreign_schema_is_not_registered(text: str) -> None:
    with pytest.raises(RecordError) as caught:
        register_writer(text)
    assert caught.value.reason == DeadReason.INVALID


def test_a_hostile_count_of_another_writer_is_refused_too() -> None:
    text = other_writer(Close, notes={"name": "notes", "type": {"type": "array", "items": "string"}})
    data = write_as(text, EXAMPLES[Close], notes=[])
    assert decode(data) == EXAMPLES[Close]
    assert refusal(data[:-1] + long_of(1 << 40)).reason == DeadReason.UNDECODABLE


# Lint of our own schemas


def walk(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return [found for one in schema for found in walk(one)]
    if isinstance(schema, dict):
        return [schema, *(found for key in ("type", "items", "values", "fields") for found in walk(schema.get(key)))]
    return [schema]


@each_type
def test_our_schemas_are_sound(cls: type[Any]) -> None:
    tree = json.loads(schema_text(cls))
    assert tree["namespace"] == "offsetrl.v0" and tree["name"] == cls.__name__
    # Compiling a scan refuses recursion and items of no bytes; it has been done at import, and is done here again.
    scanner(tree)
    for found in walk(tree):
        if isinstance(found, dict) and found.get("type") == "enum":
            assert found["default"] == "unknown" == found["symbols"][-1]
        if isinstance(found, dict) and found.get("type") == "array":
            assert found["items"] not in ("int", "float", "boolean"), "per-token data is packed"


def test_big_fields_come_last() -> None:
    for cls in (Trajectory, Outcome):
        tree = json.loads(schema_text(cls))
        specs = tree["fields"] if cls is Trajectory else tree["fields"][-1]["type"]["items"]["fields"]
        assert [spec["name"] for spec in specs][-3:] == ["tokens", "loss_mask", "logprobs"]


def test_a_name_that_two_schemas_share_means_the_same() -> None:
    found: dict[str, Any] = {}
    for cls in TYPES:
        for one in walk(json.loads(schema_text(cls))):
            if isinstance(one, dict) and one.get("type") in ("record", "enum") and "name" in one:
                assert found.setdefault(one["name"], one) == one
