"""The scan: passes over every good body, stops at hostile ones, and does not compile what must not be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import HEADER_BYTES, encode, schema_text
from schemas.errors import RecordError
from schemas.records import DeadReason
from schemas.scan import MAX_DEPTH, scanner
from support.samples import RECORDS

SCANS = {cls: scanner(json.loads(schema_text(cls))) for cls in RECORDS}


@settings(max_examples=150)
@given(st.sampled_from(list(RECORDS)).flatmap(lambda cls: RECORDS[cls]))
def test_every_good_body_passes(record: Any) -> None:
    SCANS[type(record)](encode(record), HEADER_BYTES, 100)


@settings(max_examples=60)
@given(st.sampled_from(list(RECORDS)).flatmap(lambda cls: RECORDS[cls]), st.data())
def test_a_body_that_is_cut_anywhere_does_not_pass(record: Any, data: st.DataObject) -> None:
    good = encode(record)
    at = data.draw(st.integers(HEADER_BYTES, len(good) - 1))
    with pytest.raises(RecordError) as caught:
        SCANS[type(record)](good[:at], HEADER_BYTES, 100)
    assert caught.value.reason == DeadReason.UNDECODABLE


ARRAY = {"type": "array", "items": "boolean"}


@pytest.mark.parametrize(
    ("schema", "body", "allowed"),
    [
        (ARRAY, "04010100", 2),
        (ARRAY, "0302010100", 2),  # -2 items, in 1 byte (the size is not believed)
        (ARRAY, "0201020100", 2),  # two blocks
        ({"type": "map", "values": "long"}, "0202610600", 1),
        ({"type": "map", "values": "null"}, "02026100", 1),
        (["null", "long"], "0206", 0),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "02", 0),
        ({"type": "fixed", "name": "F", "size": 3}, "010203", 0),
        ({"type": "string", "logicalType": "uuid"}, "0461ff", 0),
        ("long", "ffffffffffffffffff01", 0),
    ],
)
def test_the_end_of_a_body_is_found(schema: Any, body: str, allowed: int) -> None:
    scanner(schema)(bytes.fromhex(body), 0, allowed)
    with pytest.raises(RecordError, match="ends at byte"):
        scanner(schema)(bytes.fromhex(body + "00"), 0, allowed)
    if allowed:
        with pytest.raises(RecordError, match=f"more than {allowed - 1} items"):
            scanner(schema)(bytes.fromhex(body), 0, allowed - 1)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ("long", "8080808080808080808001"),
        ("long", ""),
        ("string", "05616161"),
        ("bytes", "0a61"),
        (["null", "long"], "04"),
        (["null", "long"], "0106"),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "04"),
        ({"type": "enum", "name": "E", "symbols": ["a", "b"]}, "01"),
    ],
)
def test_a_bad_body_is_refused(schema: Any, body: str) -> None:
    with pytest.raises(RecordError) as caught:
        scanner(schema)(bytes.fromhex(body), 0, 10)
    assert caught.value.reason == DeadReason.UNDECODABLE


def test_a_position_never_moves_back() -> None:
    with pytest.raises(RecordError, match="-3 bytes are wanted"):
        scanner("string")(bytes.fromhex("05616161"), 0, 10)


def nested(depth: int) -> Any:
    return {"type": "array", "items": nested(depth - 1)} if depth else "long"


def record(*types: Any) -> Any:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": kind} for n, kind in enumerate(types)]}


@pytest.mark.parametrize(
    "schema",
    [
        record("R"),
        record({"type": "array", "items": "R"}),
        {"type": "array", "items": "null"},
        {"type": "array", "items": record()},
        {"type": "array", "items": record("null", {"type": "fixed", "name": "Z", "size": 0})},
        "nobody",
        nested(MAX_DEPTH + 1),
    ],
)
def test_a_dangerous_schema_is_not_compiled(schema: Any) -> None:
    with pytest.raises(RecordError) as caught:
        scanner(schema)
    assert caught.value.reason == DeadReason.INVALID
