"""Whether records of two schemas can be read by each other's readers: by Avro's rules, and by reading real bytes. Pure.

Full-transitive evolution asks both ways of every two generations of a type. What it leaves to change: a field with a default
may come or go, an enum with a default may gain a symbol, docs and the order of fields may change. All else stays for ever.

Stricter than Avro in two ways: no promotion of numbers (it goes one way only), and none between text and bytes (the values
would change their type).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import fastavro

from schemas.codec import HEADER_BYTES

Schema = Any


class Generation(NamedTuple):
    """A schema of one type as it once was, and an example record's bytes in it."""

    name: str
    text: str
    data: bytes


def problems(writer: str, reader: str) -> list[str]:
    """Why records of one schema (JSON text) cannot always be read with another; [] when they can.

    >>> one = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}]}'
    >>> two = '{"type": "record", "name": "R", "fields": []}'
    >>> problems(one, two), problems(two, one)
    ([], ['R.a: not written, and the reader has no default for it'])
    """
    return list(_problems(json.loads(writer), json.loads(reader), "", {}, {}))


def unreadable(data: bytes, writer: str, reader: str) -> str | None:
    """Why these bytes, header and all, are not read with the reader's schema by fastavro; None when they are, whole."""
    body = io.BytesIO(data[HEADER_BYTES:])
    try:
        fastavro.schemaless_reader(
            body, fastavro.parse_schema(json.loads(writer)), fastavro.parse_schema(json.loads(reader))
        )
    except Exception as error:  # noqa: BLE001  # fastavro raises nearly anything
        return f"{type(error).__name__}: {error}"
    left = len(data) - HEADER_BYTES - body.tell()
    return f"{left} bytes are left over" if left else None


def findings(generations: list[Generation]) -> list[str]:
    """What stands against reading each generation with the schema of each other, both ways."""
    found = []
    for old, new in permutations(generations, 2):
        where = f"{old.name} read as {new.name}"
        found += [f"{where}: {problem}" for problem in problems(old.text, new.text)]
        if (why := unreadable(old.data, old.text, new.text)) is not None:
            found.append(f"{where}: its example is not read: {why}")
    return found


def _problems(
    writer: Schema, reader: Schema, at: str, written: dict[str, Schema], read: dict[str, Schema]
) -> Iterator[str]:
    writer, reader = _named(writer, written), _named(reader, read)
    if isinstance(writer, list) or isinstance(reader, list):
        yield from _unions(writer, reader, at, written, read)
        return
    kind, other = _kind(writer), _kind(reader)
    if kind != other:
        yield f"{at}: {kind} is read as {other}"
    elif kind in ("record", "enum", "fixed") and writer["name"].split(".")[-1] != reader["name"].split(".")[-1]:
        yield f"{at}: {writer['name']} is read as {reader['name']}"
    elif kind == "record":
        yield from _records(writer, reader, f"{at}." if at else "", written, read)
    elif kind == "enum":
        strange = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
        if strange and "default" not in reader:
            yield f"{at}: {', '.join(strange)} unknown, and the enum has no default"
    elif kind == "fixed" and writer["size"] != reader["size"]:
        yield f"{at}: {writer['size']} bytes are read as {reader['size']}"
    elif kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        yield from _problems(writer[inner], reader[inner], f"{at}[]", written, read)


def _records(
    writer: Schema, reader: Schema, prefix: str, written: dict[str, Schema], read: dict[str, Schema]
) -> Iterator[str]:
    there = {field["name"]: field for field in writer["fields"]}
    prefix = prefix or f"{reader['name'].split('.')[-1]}."
    for field in reader["fields"]:
        name = prefix + field["name"]
        if field["name"] in there:
            yield from _problems(there[field["name"]]["type"], field["type"], name, written, read)
        elif "default" not in field:
            yield f"{name}: not written, and the reader has no default for it"
    known = {field["name"] for field in reader["fields"]}
    for name in there.keys() - known:  # passed over, but types that it defines may be named further on
        _learn(there[name]["type"], written)


def _unions(
    writer: Schema, reader: Schema, at: str, written: dict[str, Schema], read: dict[str, Schema]
) -> Iterator[str]:
    branches = reader if isinstance(reader, list) else [reader]
    for branch in writer if isinstance(writer, list) else [writer]:
        if all(any(_problems(branch, other, at, dict(written), dict(read))) for other in branches):
            yield f"{at}: {_kind(_named(branch, written))} is read as {' or '.join(_kind(_named(b, read)) for b in branches)}"


def _kind(schema: Schema) -> str:
    return str(schema["type"] if isinstance(schema, dict) else schema)


def _named(schema: Schema, known: dict[str, Schema]) -> Schema:
    """A schema, or the one that a name stands for; what it defines is remembered."""
    _learn(schema, known)
    if isinstance(schema, dict) and isinstance(schema["type"], (dict, list)):
        return _named(schema["type"], known)
    return known.get(schema.split(".")[-1], schema) if isinstance(schema, str) else schema


def _learn(schema: Schema, known: dict[str, Schema]) -> None:
    if isinstance(schema, dict) and "name" in schema and schema.get("type") in ("record", "enum", "fixed"):
        known[schema["name"].split(".")[-1]] = schema
