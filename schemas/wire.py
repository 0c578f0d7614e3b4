"""Avro's binary encoding for the kinds of fields that our records have: written and read without a dict in between.

A `Kind` belongs to one annotation and one Avro type. Kinds of single values are "many": neighbouring fields of one kind
are handled by one call with one loop, which is why the schemas group their fields by type. Reading trusts nothing: sizes
and counts are never negative, a position never moves back, and whoever calls must check at the end that the position is
the data's length, for a slice beyond the end is short without complaint.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schemas.records import Role, Segment, VersionRun

MAX_ITEMS = 65_536
"""Items in one array or map; per-token data is packed and does not count."""

Add = Callable[[Any], None]
Write = Callable[[Any, Add], None]
"""(value, or the values of neighbouring fields; where to add bytes)"""
Read = Callable[[bytes, int, Add, int], int]
"""(data, position, where to add values, how many fields) -> next position"""

ROLES = (Role.PROMPT, Role.SAMPLED, Role.TOOL, Role.OBSERVATION)
"""A role's number on the wire is its place here, for ever; any other number is read as UNKNOWN."""
_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_ROLES = dict(enumerate(ROLES))
_RUN = struct.Struct("<qqq")
_SEGMENT = struct.Struct("<ii")
_DOUBLE = struct.Struct("<d")
_SIZES = tuple(bytes([2 * size]) for size in range(64))
_SMALL = (*(bytes([2 * value]) for value in range(64)), *(bytes([-2 * value - 1]) for value in range(-64, 0)))
"""Numbers of one byte; -64 to -1 are found by Python's negative indices."""
_VALUES = tuple((byte >> 1) ^ -(byte & 1) for byte in range(128))
_BOOLEANS = {0: False, 1: True}
_tuple_of = tuple.__new__


class Unfit(ValueError):
    """A value that its field cannot hold; `Shape` adds the field's name."""


class Malformed(ValueError):
    """Bytes that are no Avro."""


class Kind(NamedTuple):
    """How one kind of field is checked, written and read."""

    avro: Any
    allowed: frozenset[type]
    write: Write
    read: Read
    many: bool = False


def write_long(value: int) -> bytes:
    """A number of 64 bits, zigzag and variable-length.

    >>> write_long(64).hex(), write_long(-1).hex()
    ('8001', '01')
    """
    if not -(2**63) <= value < 2**63:
        raise Unfit("a whole number of 64 bits is allowed")
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def read_long(data: bytes, at: int) -> tuple[int, int]:
    """(number, next position)."""
    rest = shift = 0
    while True:
        byte = data[at]
        at += 1
        rest |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise Malformed(f"a number of more than 10 bytes before byte {at}")
    if rest >= 2**64:
        raise Malformed(f"a number of more than 64 bits before byte {at}")
    return (rest >> 1) ^ -(rest & 1), at


def _size(size: int) -> bytes:
    return _SIZES[size] if size < 64 else write_long(size)


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128 and not byte & 1:
        return byte >> 1, at + 1
    size, at = read_long(data, at)
    if size < 0:
        raise Malformed(f"size {size} before byte {at}")
    return size, at


def _read_count(data: bytes, at: int) -> tuple[int, int]:
    """Items in the next block of an array or map; 0 ends it. A negative count is followed by the block's size."""
    byte = data[at]
    if byte < 128 and not byte & 1:
        return byte >> 1, at + 1
    count, at = read_long(data, at)
    if count < 0:
        count, (_, at) = -count, read_long(data, at)
    if count > MAX_ITEMS:
        raise Malformed(f"{count} items before byte {at}; {MAX_ITEMS} are allowed")
    return count, at


def _write_strings(values: tuple[str, ...], add: Add) -> None:
    for value in values:
        data = value.encode()
        size = len(data)
        add(_SIZES[size] if size < 64 else write_long(size))
        add(data)


def _read_strings(data: bytes, at: int, add: Add, count: int) -> int:
    for _ in range(count):
        size = data[at]
        if size < 128 and not size & 1:
            start = at + 1
            at = start + (size >> 1)
        else:
            size, start = _read_size(data, at)
            at = start + size
        add(data[start:at].decode())
    return at


def _write_bytes(values: tuple[bytes, ...], add: Add) -> None:
    for value in values:
        size = len(value)
        add(_SIZES[size] if size < 64 else write_long(size))
        add(value)


def _read_bytes(data: bytes, at: int, add: Add, count: int) -> int:
    for _ in range(count):
        size, start = _read_size(data, at)
        at = start + size
        add(data[start:at])
    return at


def _write_longs(values: tuple[int, ...], add: Add) -> None:
    for value in values:
        add(_SMALL[value] if -64 <= value < 64 else write_long(value))


def _read_longs(data: bytes, at: int, add: Add, count: int) -> int:
    for _ in range(count):
        byte = data[at]
        if byte < 128:
            at += 1
            add(_VALUES[byte])
        else:
            value, at = read_long(data, at)
            add(value)
    return at


def _write_doubles(values: tuple[float, ...], add: Add) -> None:
    for value in values:
        if not math.isfinite(value):
            raise Unfit("a finite number is wanted")
        add(_DOUBLE.pack(value))


def _read_doubles(data: bytes, at: int, add: Add, count: int) -> int:
    for value in struct.unpack_from(f"<{count}d", data, at):
        add(value)
    return at + 8 * count


def _write_booleans(values: tuple[bool, ...], add: Add) -> None:
    for value in values:
        add(b"\x01" if value else b"\x00")


def _read_booleans(data: bytes, at: int, add: Add, count: int) -> int:
    for byte in data[at : at + count]:
        add(_BOOLEANS[byte])
    return at + count


STRING = Kind("string", frozenset({str}), _write_strings, _read_strings, many=True)
BYTES = Kind("bytes", frozenset({bytes}), _write_bytes, _read_bytes, many=True)
LONG = Kind("long", frozenset({int}), _write_longs, _read_longs, many=True)
DOUBLE = Kind("double", frozenset({float, int}), _write_doubles, _read_doubles, many=True)
BOOLEAN = Kind("boolean", frozenset({bool}), _write_booleans, _read_booleans, many=True)


def optional(kind: Kind) -> Kind:
    """A value of `kind`, or None: an Avro union of null and that."""

    def write(value: Any, add: Add) -> None:
        if value is None:
            add(b"\x00")
        else:
            add(b"\x02")
            kind.write((value,), add)

    def read(data: bytes, at: int, add: Add, count: int) -> int:
        if data[at] == 2:
            return kind.read(data, at + 1, add, 1)
        if data[at] != 0:
            raise Malformed(f"branch {data[at]} at byte {at}")
        add(None)
        return at + 1

    return Kind(["null", kind.avro], kind.allowed | {type(None)}, write, read)


def enumeration(cls: type[enum.StrEnum]) -> Kind:
    """A member by its place among the schema's symbols, which are the values in their order."""
    numbers = {member: bytes([2 * number]) for number, member in enumerate(cls)}
    members = {2 * number: member for number, member in enumerate(cls)}
    avro = {"type": "enum", "name": cls.__name__, "symbols": [member.value for member in cls], "default": "unknown"}

    def write(value: Any, add: Add) -> None:
        add(numbers[value])

    def read(data: bytes, at: int, add: Add, count: int) -> int:
        add(members[data[at]])
        return at + 1

    return Kind(avro, frozenset({cls}), write, read)


def mapping(kind: Kind, finite: bool = True) -> Kind:
    """A map from text to values of `kind`; NaN and infinity are written where `finite` is off."""
    double = kind.avro == "double"

    def write(values: Mapping[str, Any], add: Add) -> None:
        if values:
            add(_size(len(values)))
            for name, value in values.items():
                if type(name) is not str or type(value) not in kind.allowed:
                    raise Unfit(f"item {name!r}: {value!r} is not {_names({str})}: {_names(kind.allowed)}")
                _write_strings((name,), add)
                if double and (not finite or math.isfinite(value)):
                    add(_DOUBLE.pack(value))
                else:
                    kind.write((value,), add)
        add(b"\x00")

    def read(data: bytes, at: int, add: Add, count: int) -> int:
        values: dict[str, Any] = {}
        last: list[Any] = []
        while True:
            count, at = _read_count(data, at)
            if not count:
                break
            for _ in range(count):
                size, start = _read_size(data, at)
                at = start + size
                name = data[start:at].decode()
                if double:  # by far the most frequent, worth a line of its own
                    values[name] = _DOUBLE.unpack_from(data, at)[0]
                    at += 8
                else:
                    at = kind.read(data, at, last.append, 1)
                    values[name] = last.pop()
        add(values)
        return at

    return Kind({"type": "map", "values": kind.avro}, frozenset({dict}), write, read)


def array(avro: Any, allowed: type | tuple[type, ...], write_item: Write, read_item: Read) -> Kind:
    """A tuple of items, each of the type `allowed` exactly."""
    types = allowed if isinstance(allowed, tuple) else (allowed,)

    def write(values: tuple[Any, ...], add: Add) -> None:
        if values:
            add(_size(len(values)))
            for value in values:
                if type(value) not in types:
                    raise Unfit(f"item {value!r} is not {_names(types)}")
                write_item(value, add)
        add(b"\x00")

    def read(data: bytes, at: int, add: Add, count: int) -> int:
        items: list[Any] = []
        while True:
            count, at = _read_count(data, at)
            if not count:
                break
            for _ in range(count):
                at = read_item(data, at, items.append, 1)
        add(tuple(items))
        return at

    return Kind({"type": "array", "items": avro}, frozenset({tuple}), write, read)


def _names(types: Any) -> str:
    return " or ".join(sorted(one.__name__ for one in types))


def _check_row(row: Any, cls: type[Any], expected: tuple[type, ...]) -> None:
    if type(row) is not cls or tuple(map(type, row)) != expected:
        raise Unfit(f"item {row!r} is not {cls.__name__}({', '.join(kind.__name__ for kind in expected)})")


def pack_versions(runs: tuple[VersionRun, ...]) -> bytes:
    """Rows of three little-endian int64: epoch, version, count.

    >>> len(pack_versions((VersionRun(1, 7, 512),)))
    24
    """
    for run in runs:
        _check_row(run, VersionRun, (int, int, int))
    return b"".join([_RUN.pack(*run) for run in runs])


def unpack_versions(data: bytes) -> tuple[VersionRun, ...]:
    """The version runs of a record."""
    return tuple([_tuple_of(VersionRun, row) for row in _RUN.iter_unpack(data)])


def pack_segments(segments: tuple[Segment, ...]) -> bytes:
    """Rows of two little-endian int32: number of the role, count.

    >>> pack_segments((Segment(Role.SAMPLED, 3),)).hex()
    '0100000003000000'
    """
    for segment in segments:
        _check_row(segment, Segment, (Role, int))
        if segment.role not in _ROLE_NUMBERS:
            raise Unfit(f"role {segment.role} can be read, not written; roles are {', '.join(ROLES)}")
    return b"".join([_SEGMENT.pack(_ROLE_NUMBERS[role], count) for role, count in segments])


def unpack_segments(data: bytes) -> tuple[Segment, ...]:
    """The segments of a record; a role from a newer writer is read as UNKNOWN."""
    rows = _SEGMENT.iter_unpack(data)
    return tuple([_tuple_of(Segment, (_ROLES.get(number, Role.UNKNOWN), count)) for number, count in rows])


def packed_rows(pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> Kind:
    """A tuple of named tuples of numbers, as the bytes that `pack` makes of it."""

    def write(rows: Any, add: Add) -> None:
        _write_bytes((pack(rows),), add)

    def read(data: bytes, at: int, add: Add, count: int) -> int:
        size, start = _read_size(data, at)
        add(unpack(data[start : start + size]))
        return start + size

    return Kind("bytes", frozenset({tuple}), write, read)


def _write_header(header: tuple[str, bytes], add: Add) -> None:
    _check_row(header, tuple, (str, bytes))
    _write_strings(header[:1], add)
    _write_bytes(header[1:], add)


def _read_header(data: bytes, at: int, add: Add, count: int) -> int:
    pair: list[Any] = []
    at = _read_bytes(data, _read_strings(data, at, pair.append, 1), pair.append, 1)
    add(tuple(pair))
    return at


_HEADER = {
    "type": "record",
    "name": "Header",
    "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": "bytes"}],
}
VERSIONS = packed_rows(pack_versions, unpack_versions)
SEGMENTS = packed_rows(pack_segments, unpack_segments)
HEADERS = array(_HEADER, tuple, _write_header, _read_header)
DOUBLES = array("double", (float, int), lambda value, add: _write_doubles((value,), add), _read_doubles)
