"""The kinds of fields that our records have: how each is checked, written as Avro, and taken from what Avro reads.

Writing goes without fastavro, from values straight to bytes: twice as fast, and every check has its place. Kinds of
single values are "many": neighbouring fields of one kind are written by one call whose loops run in C, which is why the
schemas group their fields by type. (Reading is fastavro's; in Python its byte-by-byte steps would be slower.)
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from schemas.records import Role, Segment, VersionRun

Add = Callable[[Any], None]
"""Takes an iterable of pieces of bytes: `list.extend`."""
Write = Callable[[Any, Add], None]
"""(value, or the values of neighbouring fields; where to add pieces)"""

ROLES = (Role.PROMPT, Role.SAMPLED, Role.TOOL, Role.OBSERVATION)
"""A role's number on the wire is its place here, for ever; any other number is read as UNKNOWN."""
_ROLE_NUMBERS = {id(role): number for number, role in (*enumerate(ROLES), (-1, Role.UNKNOWN))}
"""By identity: members live for ever, and hashing one is a call into Python."""
_ROLES = dict(enumerate(ROLES))
_UNKNOWN = Role.UNKNOWN
_RUN = struct.Struct("<qqq")
_SEGMENT = struct.Struct("<ii")
_DOUBLE = struct.Struct("<d")
_FEW_DOUBLES = tuple(struct.Struct(f"<{count}d").pack for count in range(16))
_END = (b"\x00",)
_SECOND = (b"\x02",)
_tuple_of = tuple.__new__


class Unfit(ValueError):
    """A value that its field cannot hold; `Shape` adds the field's name."""


class Kind(NamedTuple):
    """How one kind of field is checked and written, and what is done to what was read (nothing, mostly)."""

    avro: Any
    allowed: frozenset[type]
    write: Write
    read: Callable[[Any], Any] | None = None
    many: bool = False


class _Longs(dict[int, bytes]):
    """Numbers as Avro writes them, zigzag and variable-length; small ones are ready made, others kept for a while."""

    def __missing__(self, value: int) -> bytes:
        if not -(2**63) <= value < 2**63:
            raise Unfit("a whole number of 64 bits is allowed")
        rest = (value << 1) ^ (value >> 63)
        out = bytearray()
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
        if len(self) >= _MOST_LONGS:
            self.clear()
            self.update(_READY_LONGS)
        data = self[value] = bytes(out)
        return data


class _Texts(dict[str, bytes]):
    """Text as Avro writes it; short text is kept ready made, for names of runs, tasks and workers repeat for ever."""

    def __missing__(self, value: str) -> bytes:
        data = value.encode()
        data = write_long(len(data)) + data
        if len(data) <= 80:
            if len(self) >= 4096:
                self.clear()
            self[value] = data
        return data


_MOST_LONGS = 16 * 1024
_READY_LONGS: dict[int, bytes] = {}
_LONGS = _Longs()
_READY_LONGS.update({value: _LONGS[value] for value in range(-64, 4096)})
write_long = _LONGS.__getitem__
"""Bytes of a number of 64 bits.

>>> write_long(64).hex(), write_long(-1).hex()
('8001', '01')
"""
_write_text = _Texts().__getitem__


def _write_longs(values: tuple[int, ...], add: Add) -> None:
    add(map(write_long, values))


def _write_strings(values: tuple[str, ...], add: Add) -> None:
    add(map(_write_text, values))


def _write_bytes(values: tuple[bytes, ...], add: Add) -> None:
    add(chain.from_iterable(zip(map(write_long, map(len, values)), values)))  # noqa: B905


def _write_doubles(values: tuple[float, ...], add: Add) -> None:
    if not all(map(math.isfinite, values)):
        raise Unfit("a finite number is wanted")
    count = len(values)
    add((_FEW_DOUBLES[count](*values) if count < 16 else struct.pack(f"<{count}d", *values),))


def _write_booleans(values: tuple[bool, ...], add: Add) -> None:
    add((bytes(values),))


STRING = Kind("string", frozenset({str}), _write_strings, many=True)
BYTES = Kind("bytes", frozenset({bytes}), _write_bytes, many=True)
LONG = Kind("long", frozenset({int}), _write_longs, many=True)
DOUBLE = Kind("double", frozenset({float, int}), _write_doubles, many=True)
BOOLEAN = Kind("boolean", frozenset({bool}), _write_booleans, many=True)


def optional(kind: Kind) -> Kind:
    """A value of `kind`, or None: an Avro union of null and that."""

    def write(value: Any, add: Add) -> None:
        if value is None:
            add(_END)
        else:
            add(_SECOND)
            kind.write((value,), add)

    return Kind(["null", kind.avro], kind.allowed | {type(None)}, write)


def enumeration(cls: type[enum.StrEnum]) -> Kind:
    """A member by its place among the schema's symbols, which are the values in their order."""
    numbers = {id(member): (write_long(number),) for number, member in enumerate(cls)}  # by identity, see above
    avro = {"type": "enum", "name": cls.__name__, "symbols": [member.value for member in cls], "default": "unknown"}

    def write(value: Any, add: Add) -> None:
        add(numbers[id(value)])

    return Kind(avro, frozenset({cls}), write, {member.value: member for member in cls}.__getitem__)


def number_map(finite: bool) -> Kind:
    """A map from text to double; NaN and infinity are refused where `finite` is asked for."""

    allowed, isfinite, pack = DOUBLE.allowed, math.isfinite, _DOUBLE.pack

    def write(values: Mapping[str, float], add: Add) -> None:
        if values:
            pieces = [write_long(len(values))]
            for name, value in values.items():
                if type(name) is not str or type(value) not in allowed:
                    raise Unfit(f"item {name!r}: {value!r} is not str: float")
                if finite and not isfinite(value):
                    raise Unfit(f"item {name!r}: {value!r}: a finite number is wanted")
                pieces += (_write_text(name), pack(value))
            add(pieces)
        add(_END)

    return Kind({"type": "map", "values": "double"}, frozenset({dict}), write)


def _write_text_map(values: Mapping[str, str], add: Add) -> None:
    if values:
        add((write_long(len(values)),))
        for pair in values.items():
            if tuple(map(type, pair)) != (str, str):
                raise Unfit(f"item {pair[0]!r}: {pair[1]!r} is not str: str")
            _write_strings(pair, add)
    add(_END)


def _write_numbers(values: tuple[float, ...], add: Add) -> None:
    if values:
        if not DOUBLE.allowed.issuperset(map(type, values)):
            raise Unfit("items of float are allowed")
        add((write_long(len(values)),))
        _write_doubles(values, add)
    add(_END)


def _write_whole_numbers(values: tuple[int, ...], add: Add) -> None:
    if values:
        if not LONG.allowed.issuperset(map(type, values)):
            raise Unfit("items of int are allowed")
        add((write_long(len(values)),))
        _write_longs(values, add)
    add(_END)


def array(avro: Any, item: type, write_item: Write, read_item: Callable[[Any], Any]) -> Kind:
    """A tuple of records, each of the type `item` exactly."""

    def write(values: tuple[Any, ...], add: Add) -> None:
        if values:
            add((write_long(len(values)),))
            for value in values:
                if type(value) is not item:
                    raise Unfit(f"item {value!r} is not {item.__name__}")
                write_item(value, add)
        add(_END)

    def read(values: list[Any]) -> tuple[Any, ...]:
        return tuple(map(read_item, values))

    return Kind({"type": "array", "items": avro}, frozenset({tuple}), write, read)


def _write_header(header: tuple[str, bytes], add: Add) -> None:
    if tuple(map(type, header)) != (str, bytes):
        raise Unfit(f"header {header!r} is not (str, bytes)")
    _write_strings(header[:1], add)
    _write_bytes(header[1:], add)


def _read_header(header: dict[str, Any]) -> tuple[str, bytes]:
    return header["name"], header["value"]


def pack_versions(runs: tuple[VersionRun, ...]) -> bytes:
    """Rows of three little-endian int64: epoch, version, count.

    >>> len(pack_versions((VersionRun(1, 7, 512),)))
    24
    """
    for run in runs:
        if type(run) is not VersionRun:
            raise Unfit(f"item {run!r} is not VersionRun(int, int, int)")
    return _RUN.pack(*runs[0]) if len(runs) == 1 else b"".join([_RUN.pack(*run) for run in runs])


def unpack_versions(data: bytes) -> tuple[VersionRun, ...]:
    """The version runs of a record."""
    return tuple([_tuple_of(VersionRun, row) for row in _RUN.iter_unpack(data)])


def pack_segments(segments: tuple[Segment, ...]) -> bytes:
    """Rows of two little-endian int32: number of the role, count.

    >>> pack_segments((Segment(Role.SAMPLED, 3),)).hex()
    '0100000003000000'
    """
    for segment in segments:
        if type(segment) is not Segment or id(segment.role) not in _ROLE_NUMBERS:
            raise Unfit(f"item {segment!r} is not Segment(role, int); roles are {', '.join(Role)}")
    return b"".join([_SEGMENT.pack(_ROLE_NUMBERS[id(role)], count) for role, count in segments])


def unpack_segments(data: bytes) -> tuple[Segment, ...]:
    """The segments of a record; a role from a newer writer is read as UNKNOWN."""
    rows = _SEGMENT.iter_unpack(data)
    return tuple([_tuple_of(Segment, (_ROLES.get(number, _UNKNOWN), count)) for number, count in rows])


def _packed(pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]) -> Kind:
    def write(rows: Any, add: Add) -> None:
        data = pack(rows)
        add((write_long(len(data)), data))

    return Kind("bytes", frozenset({tuple}), write, unpack)


_HEADER = {
    "type": "record",
    "name": "Header",
    "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": "bytes"}],
}
TEXT_MAP = Kind({"type": "map", "values": "string"}, frozenset({dict}), _write_text_map)
DOUBLES = Kind({"type": "array", "items": "double"}, frozenset({tuple}), _write_numbers, tuple)
LONGS = Kind({"type": "array", "items": "long"}, frozenset({tuple}), _write_whole_numbers, tuple)
VERSIONS = _packed(pack_versions, unpack_versions)
SEGMENTS = _packed(pack_segments, unpack_segments)
HEADERS = array(_HEADER, tuple, _write_header, _read_header)
