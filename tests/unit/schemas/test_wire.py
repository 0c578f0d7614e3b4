"""The pieces that records are written of."""

from __future__ import annotations

import io
import struct
from typing import Any

import fastavro
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas import wire
from schemas.records import Role, Segment, VersionRun
from schemas.wire import BYTES, DOUBLE, LONG, STRING, Kind, Unfit

PLAIN: list[tuple[Kind, st.SearchStrategy[Any]]] = [
    (STRING, st.text(max_size=200)),
    (BYTES, st.binary(max_size=200)),
    (LONG, st.integers(-(2**63), 2**63 - 1)),
    (DOUBLE, st.floats(allow_nan=False, allow_infinity=False)),
    (wire.BOOLEAN, st.booleans()),
    (wire.optional(DOUBLE), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    (wire.number_map(finite=False), st.dictionaries(st.text(), st.floats(), max_size=70)),
    (wire.TEXT_MAP, st.dictionaries(st.text(), st.text(), max_size=70)),
]


def written(kind: Kind, *values: Any) -> bytes:
    pieces: list[bytes] = []
    kind.write(values if kind.many else values[0], pieces.extend)
    return b"".join(pieces)


def as_avro(kind: Kind, *values: Any) -> bytes:
    buffer = io.BytesIO()
    for value in values:
        fastavro.schemaless_writer(buffer, fastavro.parse_schema(kind.avro), value)
    return buffer.getvalue()


@given(st.sampled_from(PLAIN).flatmap(lambda one: st.tuples(st.just(one[0]), one[1])))
@example((LONG, -65))
@example((LONG, 4096))
@example((STRING, "x" * 64))
def test_single_values_are_written_as_avro_writes_them(case: tuple[Kind, Any]) -> None:
    kind, value = case
    assert written(kind, value) == as_avro(kind, value)


@given(st.lists(st.text(max_size=80)), st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_neighbours_are_written_one_after_the_other(texts: list[str], numbers: list[int]) -> None:
    assert written(STRING, *texts) == as_avro(STRING, *texts)
    assert written(LONG, *numbers) == as_avro(LONG, *numbers)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**40])
def test_a_number_of_more_than_64_bits_is_refused(value: int) -> None:
    with pytest.raises(Unfit, match="64 bits"):
        written(LONG, value)


def test_text_kept_ready_made_is_bounded() -> None:
    texts = wire._Texts()
    for number in range(10_000):
        assert texts[str(number)] == as_avro(STRING, str(number))
    assert len(texts) <= 4096
    assert texts["x" * 1000] == as_avro(STRING, "x" * 1000)
    assert "x" * 1000 not in texts


def test_version_runs_stand_as_three_int64() -> None:
    runs = (VersionRun(1, 2**40, 3), VersionRun(2, 0, 1))
    data = wire.pack_versions(runs)
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    assert numbers == [1, 2**40, 3, 2, 0, 1]
    assert wire.unpack_versions(data) == runs


def test_roles_have_their_numbers_for_ever() -> None:
    numbers = {
        role: int.from_bytes(wire.pack_segments((Segment(role, 1),))[:4], "little", signed=True) for role in Role
    }
    assert numbers == {Role.PROMPT: 0, Role.SAMPLED: 1, Role.TOOL: 2, Role.OBSERVATION: 3, Role.UNKNOWN: -1}


@pytest.mark.parametrize("bad", [(1, 2, 3), VersionRun(1, 2, 2**70), VersionRun(1, 2.0, 3)])  # type: ignore[arg-type]
def test_a_row_that_is_no_version_run_is_refused(bad: Any) -> None:
    with pytest.raises((Unfit, struct.error)):
        wire.pack_versions((bad,))
