"""What makes an Avro schema or body dangerous, found without decoding: recursion, empty items, hostile counts.

`scanner` compiles a schema to a function that walks a body's bytes, building nothing, and stops at the first count that
is too large. Compiling is the lint: a schema that refers to itself, or whose array items may take no bytes, is refused
(the first overflows the stack of a decoder, the second lets twelve bytes claim two thousand million items).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schemas.errors import RecordError
from schemas.records import DeadReason

Scan = Callable[[bytes, int, int], None]
"""(data, start, max_items): raises RecordError unless the body is whole and has no more items than that."""
_Walk = Callable[[bytes, int, list[int]], int]
"""(data, position, [items that may still come, items allowed]) -> next position"""
MAX_DEPTH = 16
_FIXED = {"null": 0, "boolean": 1, "float": 4, "double": 8}


def scanner(schema: Any) -> Scan:
    """Lint a schema (as JSON gives it) and compile its scan. Raises RecordError for one that must not be used."""
    walk, _ = _compile(schema, 0)

    def scan(data: bytes, start: int, max_items: int) -> None:
        end = walk(data, start, [max_items, max_items])
        if end != len(data):
            raise RecordError(DeadReason.UNDECODABLE, f"the record ends at byte {end} of {len(data)}")

    return scan


def _long(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            raise RecordError(DeadReason.UNDECODABLE, f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
    raise RecordError(DeadReason.UNDECODABLE, f"a number of more than 64 bits ends at byte {at}")


def _skip(data: bytes, at: int, size: int) -> int:
    if size < 0 or at + size > len(data):
        raise RecordError(DeadReason.UNDECODABLE, f"{size} bytes are wanted at byte {at} of {len(data)}")
    return at + size


def _compile(schema: Any, depth: int) -> tuple[_Walk, int]:
    """The walk of a schema and the least number of bytes that a value of it takes."""
    if depth > MAX_DEPTH:
        raise _refused(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(schema, list):
        return _union([_compile(branch, depth + 1)[0] for branch in schema])
    if isinstance(schema, str):
        return _primitive(schema)
    kind = schema["type"]
    if not isinstance(kind, str):
        return _compile(kind, depth + 1)
    if kind in ("array", "map"):
        return _blocks(*_compile(schema["items" if kind == "array" else "values"], depth + 1), kind == "map")
    if kind == "enum":
        return _index(len(schema["symbols"])), 1
    if kind == "fixed":
        return _sized(int(schema["size"]))
    if kind == "record":
        return _record([_compile(field["type"], depth + 1) for field in schema["fields"]])
    return _primitive(kind)


def _refused(why: str) -> RecordError:
    return RecordError(DeadReason.INVALID, f"schema refused: {why}")


def _primitive(kind: str) -> tuple[_Walk, int]:
    if kind in ("int", "long"):
        return (lambda data, at, _: _long(data, at)[1]), 1
    if kind in ("bytes", "string"):
        return (lambda data, at, _: _skip(data, *_swap(_long(data, at)))), 1
    if kind in _FIXED:
        return _sized(_FIXED[kind])
    raise _refused(f"{kind!r} is neither a primitive nor defined in place (a type by name could refer to itself)")


def _swap(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[1], pair[0]


def _sized(size: int) -> tuple[_Walk, int]:
    return (lambda data, at, _: _skip(data, at, size)), size


def _index(count: int) -> _Walk:
    def walk(data: bytes, at: int, _: list[int]) -> int:
        value, at = _long(data, at)
        if not 0 <= value < count:
            raise RecordError(DeadReason.UNDECODABLE, f"choice {value} of {count} before byte {at}")
        return at

    return walk


def _union(branches: list[_Walk]) -> tuple[_Walk, int]:
    def walk(data: bytes, at: int, left: list[int]) -> int:
        value, at = _long(data, at)
        if not 0 <= value < len(branches):
            raise RecordError(DeadReason.UNDECODABLE, f"branch {value} of {len(branches)} before byte {at}")
        return branches[value](data, at, left)

    return walk, 1


def _record(fields: list[tuple[_Walk, int]]) -> tuple[_Walk, int]:
    walks = [walk for walk, _ in fields]

    def walk(data: bytes, at: int, left: list[int]) -> int:
        for step in walks:
            at = step(data, at, left)
        return at

    return walk, sum(least for _, least in fields)


def _blocks(item: _Walk, least: int, keyed: bool) -> tuple[_Walk, int]:
    if least == 0 and not keyed:
        raise _refused("items of an array may take no bytes")

    def walk(data: bytes, at: int, left: list[int]) -> int:
        while True:
            count, at = _long(data, at)
            if count == 0:
                return at
            if count < 0:
                count, at = -count, _long(data, at)[1]
            left[0] -= count
            if left[0] < 0:
                raise RecordError(DeadReason.UNDECODABLE, f"more than {left[1]} items in one record, at byte {at}")
            for _ in range(count):
                if keyed:
                    at = _skip(data, *_swap(_long(data, at)))
                at = item(data, at, left)

    return walk, 1
