"""Schemas: of other writers, older and newer, hostile ones, and the lint of our own."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest

from schemas import codec
from schemas.codec import decode, encode, fingerprint, kind, register_writer, schema_text
from schemas.errors import RecordError
from schemas.records import (
    Close,
    DeadReason,
    Outcome,
    Record,
    Role,
    Segment,
    Status,
    Trajectory,
)
from schemas.scan import scanner
from schemas.wire import pack_segments, unpack_segments
from support.samples import EXAMPLES, trajectory

TYPES = list(EXAMPLES)
each_type = pytest.mark.parametrize("cls", TYPES, ids=lambda cls: str(cls.__name__))


def refusal(data: bytes | None) -> RecordError:
    with pytest.raises(RecordError) as caught:
        decode(data)
    return caught.value


def long_of(value: int) -> bytes:
    rest, out = (value << 1) ^ (value >> 63), b""
    while rest > 127:
        out += bytes([rest & 127 | 128])
        rest >>= 7
    return out + bytes([rest])


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
        '{"type": "record", "name": "offsetrl.v1.Nobody", "fields": []}',
        other_writer(Close, bomb={"name": "bomb", "type": {"type": "array", "items": "null"}}),
        other_writer(
            Close, bomb={"name": "bomb", "type": {"type": "array", "items": {"type": "fixed", "name": "Z", "size": 0}}}
        ),
        other_writer(Close, bomb={"name": "bomb", "type": ["null", "offsetrl.v1.Close"]}),
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
    assert tree["namespace"] == "offsetrl.v1" and tree["name"] == cls.__name__
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
