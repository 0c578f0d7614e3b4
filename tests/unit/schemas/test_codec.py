"""The codec: round trips, the header, and hostile reads."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import fastavro
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import codec
from schemas.codec import SCHEMAS, decode, encode, fingerprint, kind, schema_text
from schemas.errors import RecordError
from schemas.records import (
    Address,
    Close,
    DeadLetter,
    DeadReason,
    Heartbeat,
    Record,
    Role,
    Sampling,
    Segment,
    Status,
    Trajectory,
    VersionRun,
)
from support.samples import EXAMPLES, RECORDS, heartbeat, plan, trajectory

TYPES = list(EXAMPLES)
each_type = pytest.mark.parametrize("cls", TYPES, ids=lambda cls: str(cls.__name__))


def refusal(data: bytes | None) -> RecordError:
    with pytest.raises(RecordError) as caught:
        decode(data)
    return caught.value


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


# Reading what is no record


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


def test_a_large_good_record_passes_the_scan() -> None:
    record = trajectory(tokens=os.urandom(4 * 100_000))
    assert len(encode(record)) > codec.SCAN_FROM_BYTES
    assert decode(encode(record)) == record
