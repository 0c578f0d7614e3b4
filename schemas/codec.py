"""Records to bytes and back: Avro single-object encoding, and the only file that speaks fastavro.

Bytes on the log are C3 01, the writer schema's CRC-64-AVRO fingerprint (8 bytes, little-endian) and the Avro body. A
schema is chosen by its fingerprint, out of this package's files and what `register_writer` was given, and from nowhere
else. Writing is strict and fails before anything is sent; reading gives a record or raises RecordError, whatever it met.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NoReturn, cast

import fastavro
from fastavro.schema import fingerprint as _avro_fingerprint
from fastavro.schema import to_parsing_canonical_form

from schemas.errors import RecordError
from schemas.records import (
    Announcement,
    Claim,
    Close,
    DeadLetter,
    DeadReason,
    Eval,
    Heartbeat,
    Outcome,
    Partial,
    Plan,
    Record,
    Request,
    Result,
    SchemaText,
    Trajectory,
)
from schemas.scan import Scan, scanner
from schemas.shape import Shape

MARKER = b"\xc3\x01"
HEADER_BYTES = 10
SCAN_FROM_BYTES = 256 * 1024
"""Larger records have their item counts checked before they are decoded; smaller ones cannot hold enough to hurt."""
MAX_ITEMS = 100_000
"""Items in all arrays and maps of one record together; per-token data is packed and does not count."""
MAX_SCHEMA_CHARS = 256 * 1024
MAX_SCHEMAS = 1000
"""Limits of what `register_writer` takes, from a topic that others may write to."""

_FILES: Mapping[type[Any], str] = {
    Request: "request",
    Trajectory: "trajectory",
    Partial: "partial",
    Close: "close",
    Outcome: "outcome",
    Claim: "claim",
    Plan: "plan",
    Result: "result",
    Announcement: "announcement",
    DeadLetter: "dead_letter",
    Heartbeat: "heartbeat",
    SchemaText: "schema_text",
    Eval: "eval",
}


class _Schema:
    """One schema text: parsed, linted and fingerprinted."""

    def __init__(self, text: str) -> None:
        tree = json.loads(text)
        self.scan: Scan = scanner(tree)
        self.parsed = fastavro.parse_schema(tree)
        self.text = text
        self.name: str = self.parsed["name"]
        self.fingerprint = bytes.fromhex(_avro_fingerprint(to_parsing_canonical_form(tree), "CRC-64-AVRO"))
        self.header = MARKER + self.fingerprint


class _Form:
    """A record type: its dataclass, its schema of this version, and the way between them."""

    def __init__(self, cls: type[Any], text: str) -> None:
        self.cls = cls
        self.schema = _Schema(text)
        self.shape: Shape[Any] = Shape(cls, json.loads(text))


_FORMS: dict[type[Any], _Form] = {
    cls: _Form(cls, files("schemas").joinpath("avro", f"{name}.avsc").read_text("utf-8"))
    for cls, name in _FILES.items()
}
_BY_NAME = {kind.schema.name: kind for kind in _FORMS.values()}
_READERS: dict[bytes, tuple[_Form, _Schema, Any]] = {
    form.schema.header: (form, form.schema, None) for form in _FORMS.values()
}
"""By the first ten bytes: the type, its writer's schema, and the schema to resolve it to (None for this version's)."""

SCHEMAS: Mapping[type[Any], str] = MappingProxyType({cls: kind.schema.text for cls, kind in _FORMS.items()})
"""The schema text of every record type."""


def encode(record: Record) -> bytes:
    """Bytes of a record for the log. Raises RecordError naming the field that its schema cannot hold."""
    form = _FORMS.get(type(record))
    if form is None:
        raise TypeError(
            f"{type(record).__name__} is no record; records are {', '.join(cls.__name__ for cls in _FORMS)}"
        )
    parts = [form.schema.header]
    form.shape.write(record, parts.extend)
    data = b"".join(parts)
    if len(data) > SCAN_FROM_BYTES:  # nothing may be written that would be refused when read
        try:
            form.schema.scan(data, HEADER_BYTES, MAX_ITEMS)
        except RecordError as error:
            raise RecordError(DeadReason.INVALID, f"{form.cls.__name__}: {error.detail}") from None
    return data


def decode(data: bytes | None) -> Record:
    """The record that stands in `data`. Raises RecordError, with a DeadReason, for everything else."""
    if not data:
        raise RecordError(DeadReason.EMPTY, "no value" if data is None else "a value of no bytes")
    form, schema, reader = _READERS.get(data[:HEADER_BYTES]) or _unreadable(data)
    if len(data) > SCAN_FROM_BYTES:
        schema.scan(data, HEADER_BYTES, MAX_ITEMS)
    body = io.BytesIO(data)
    body.seek(HEADER_BYTES)
    try:
        record = form.shape.read(fastavro.schemaless_reader(body, schema.parsed, reader))
        if reader is not None:  # a foreign schema can make fastavro give values of types that ours never does
            form.shape.write(record, [].extend)
    except Exception as error:  # hostile bytes make fastavro raise nearly anything
        raise RecordError(DeadReason.UNDECODABLE, f"{form.cls.__name__}: {type(error).__name__}: {error}") from error
    if body.tell() != len(data):
        left = len(data) - body.tell()
        raise RecordError(DeadReason.UNDECODABLE, f"{form.cls.__name__}: {left} bytes are left over after the record")
    return cast(Record, record)


def _unreadable(data: bytes) -> NoReturn:
    if data[:2] != MARKER or len(data) < HEADER_BYTES:
        raise RecordError(
            DeadReason.NOT_OURS, f"starts with {data[:HEADER_BYTES].hex()}, not with c301 and a schema's fingerprint"
        )
    raise RecordError(
        DeadReason.UNKNOWN_SCHEMA,
        f"schema {data[2:HEADER_BYTES].hex()} is neither of this version nor registered; update readers before writers",
    )


def kind(data: bytes | None) -> type[Any] | None:
    """The record type that `data` names in its header, without decoding; None for anything else."""
    reader = _READERS.get(data[:HEADER_BYTES]) if data else None
    return reader[0].cls if reader else None


def fingerprint(cls: type[Any]) -> bytes:
    """The 8 bytes that stand after the marker in a record of this type."""
    return _FORMS[cls].schema.fingerprint


def schema_text(cls: type[Any]) -> str:
    """The Avro schema that records of this type are written with, as JSON text."""
    return _FORMS[cls].schema.text


def num_schemas() -> int:
    """How many schemas can be read now: those of this version, and what was registered."""
    return len(_READERS)


def register_writer(text: str, named: str | None = None) -> bytes:
    """Allow records of an older or newer writer's schema to be read; gives its fingerprint. Registering twice is nothing.

    Raises RecordError for a text that is no schema, that names no record of ours, that has another fingerprint than the
    one it was `named` by (in hex), or that could be used against a reader (recursion, items of no bytes).
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise RecordError(
            DeadReason.INVALID, f"schema refused: {len(text)} characters; {MAX_SCHEMA_CHARS} characters are allowed"
        )
    try:
        schema = _Schema(text)
    except RecordError:
        raise
    except Exception as error:  # a hostile text makes the parsers raise nearly anything
        raise RecordError(DeadReason.INVALID, f"no Avro schema: {type(error).__name__}: {error}") from error
    if named is not None and named != schema.fingerprint.hex():
        raise RecordError(DeadReason.INVALID, f"its text has the fingerprint {schema.fingerprint.hex()}, not {named!r}")
    owner = _BY_NAME.get(schema.name)
    if owner is None:
        raise RecordError(DeadReason.INVALID, f"schema {schema.name!r} is none of {', '.join(sorted(_BY_NAME))}")
    if schema.header not in _READERS and len(_READERS) >= MAX_SCHEMAS:
        raise RecordError(DeadReason.INVALID, f"schema refused: {MAX_SCHEMAS} are known, and no more are allowed")
    _READERS.setdefault(schema.header, (owner, schema, owner.schema.parsed))
    return schema.fingerprint
