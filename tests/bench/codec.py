"""Bench `codec`: a trajectory's way to bytes and back, against Avro arrays, JSON and a plain copy of memory.

Columns: token ids, loss mask, log-probs and versions alone, from numpy arrays (ours) or lists (the others) to bytes and
back to the same. Record: the whole trajectory with its metadata, from a dataclass to bytes to a dataclass; both Avro
sides treat the metadata alike, only the columns differ. One call = one encode and one decode.

T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import fastavro
import numpy as np

from bench.harness import Bench, Side, ratio
from schemas import codec
from schemas.packing import (
    Bits,
    Floats,
    Ints,
    pack_bits,
    pack_floats,
    pack_ints,
    unpack_bits,
    unpack_floats,
    unpack_ints,
)
from schemas.records import Role, Segment, Trajectory, VersionRun
from schemas.wire import Shape, pack_versions, unpack_versions
from support.samples import trajectory

TARGETS = {("columns", 512): 25.0, ("columns", 4096): 100.0, ("record", 512): 7.0, ("record", 4096): 40.0}
NAMES = ("tokens", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True, slots=True)
class Columns:
    """The per-token data of one trajectory with a prompt and one answer, made by two sets of weights."""

    tokens: Ints
    loss_mask: Bits
    logprobs: Floats
    versions: tuple[VersionRun, ...]
    segments: tuple[Segment, ...]

    def lists(self) -> dict[str, list[Any]]:
        """The same as the lists that Avro arrays and JSON need; versions one per sampled token."""
        versions = [run.version for run in self.versions for _ in range(run.count)]
        arrays = (self.tokens, self.loss_mask, self.logprobs)
        return dict(zip(NAMES, (*(array.tolist() for array in arrays), versions), strict=True))


def make_columns(num_tokens: int) -> Columns:
    """Log-uniform token ids, an eighth of them prompt, log-probs as a sampler gives them."""
    random = np.random.default_rng(num_tokens)
    prompt = num_tokens // 8
    sampled = num_tokens - prompt
    return Columns(
        tokens=np.exp(random.uniform(0, np.log(150_000), num_tokens)).astype(np.int32),
        loss_mask=np.arange(num_tokens) >= prompt,
        logprobs=-random.exponential(0.5, sampled).astype(np.float32),
        versions=(VersionRun(1, 6, sampled // 3), VersionRun(1, 7, sampled - sampled // 3)),
        segments=(Segment(Role.PROMPT, prompt), Segment(Role.SAMPLED, sampled)),
    )


def run(bench: Bench) -> None:
    """Measure columns and records of 512 and 4096 tokens and check the four ratios."""
    for num_tokens in (512, 4096):
        columns = make_columns(num_tokens)
        for what, sides in (("columns", column_sides(columns)), ("record", record_sides(columns))):
            times = bench.measure(f"{what}, {num_tokens} tokens", sides)
            value = ratio(times["avro arrays"], times["ours"])
            bench.check(f"{what} vs arrays {num_tokens}", value, TARGETS[what, num_tokens])
            bench.hold_against(
                f"memcpy of the columns, there and back, {num_tokens} tokens", times["memcpy"].median_us(), "us"
            )


def column_sides(columns: Columns) -> list[Side]:
    """Columns alone."""
    packed = _schema(dict.fromkeys(NAMES, "bytes"))
    arrays = _schema(ARRAY_TYPES)
    lists = columns.lists()
    count = len(columns.tokens)

    def pack() -> bytes:
        return _write(
            packed,
            {
                "tokens": pack_ints(columns.tokens),
                "loss_mask": pack_bits(columns.loss_mask),
                "logprobs": pack_floats(columns.logprobs),
                "versions": pack_versions(columns.versions),
            },
        )

    def unpack(data: bytes) -> object:
        datum = _read(packed, data)
        return (
            unpack_ints(datum["tokens"]),
            unpack_bits(datum["loss_mask"], count),
            unpack_floats(datum["logprobs"]),
            unpack_versions(datum["versions"]),
        )

    def from_lists() -> object:
        return pack_ints(lists["tokens"]), pack_bits(lists["loss_mask"]), pack_floats(lists["logprobs"])

    return [
        Side("ours", lambda: unpack(pack()), len(pack())),
        Side("avro arrays", lambda: _read(arrays, _write(arrays, lists)), len(_write(arrays, lists))),
        Side("json", lambda: json.loads(json.dumps(lists)), len(json.dumps(lists))),
        Side("memcpy", _copy(columns)),
        Side("(lists to packed columns alone)", from_lists),
    ]


def record_sides(columns: Columns) -> list[Side]:
    """The whole trajectory."""
    record = make_record(columns)
    arrays = _array_codec(record, columns)
    document = {**_plain(record), **columns.lists()}

    def with_columns() -> object:
        filled = replace(record, tokens=pack_ints(columns.tokens), loss_mask=pack_bits(columns.loss_mask))
        read = codec.decode(codec.encode(filled))
        assert isinstance(read, Trajectory)
        return unpack_ints(read.tokens), unpack_bits(read.loss_mask, len(columns.tokens)), unpack_floats(read.logprobs)

    return [
        Side("ours", lambda: codec.decode(codec.encode(record)), len(codec.encode(record))),
        Side("ours, with replace, pack and unpack", with_columns),
        Side("avro arrays", lambda: arrays.decode(arrays.encode()), len(arrays.encode())),
        Side("json", lambda: json.loads(json.dumps(document)), len(json.dumps(document))),
        Side("memcpy", _copy(columns)),
    ]


def make_record(columns: Columns) -> Trajectory:
    """The example trajectory with these columns in it."""
    return trajectory(
        tokens=pack_ints(columns.tokens),
        loss_mask=pack_bits(columns.loss_mask),
        logprobs=pack_floats(columns.logprobs),
        versions=columns.versions,
        segments=columns.segments,
    )


ARRAY_TYPES: dict[str, Any] = {
    "tokens": {"type": "array", "items": "int"},
    "loss_mask": {"type": "array", "items": "boolean"},
    "logprobs": {"type": "array", "items": "float"},
    "versions": {"type": "array", "items": "int"},
}


class _array_codec:
    """The trajectory's own schema with its four columns as Avro arrays, and the same handling of its metadata."""

    def __init__(self, record: Trajectory, columns: Columns) -> None:
        self.shape = Shape(Trajectory)
        self.record = replace(record, tokens=b"", loss_mask=b"", logprobs=b"", versions=())
        self.lists = columns.lists()
        tree = json.loads(codec.schema_text(Trajectory))
        for spec in tree["fields"]:
            spec["type"] = ARRAY_TYPES.get(spec["name"], spec["type"])
        self.schema = fastavro.parse_schema(tree)

    def encode(self) -> bytes:
        datum = self.shape.write(self.record)
        datum.update(self.lists)
        return _write(self.schema, datum)

    def decode(self, data: bytes) -> object:
        datum = _read(self.schema, data)
        lists = {name: datum[name] for name in NAMES}
        datum.update(tokens=b"", loss_mask=b"", logprobs=b"", versions=b"")
        return self.shape.read(datum), lists


def _schema(fields: dict[str, Any]) -> Any:
    spec = [{"name": name, "type": kind} for name, kind in fields.items()]
    return fastavro.parse_schema({"type": "record", "name": "Columns", "fields": spec})


def _write(schema: Any, datum: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, schema, datum, strict=True)
    return buffer.getvalue()


def _read(schema: Any, data: bytes) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(data), schema, None)


def _copy(columns: Columns) -> Any:
    """The limit: the packed columns copied there and back, and nothing else."""
    parts = [columns.tokens.tobytes(), pack_bits(columns.loss_mask), columns.logprobs.tobytes()]
    there, back = bytearray(sum(map(len, parts))), bytearray(sum(map(len, parts)))
    payload = b"".join(parts)

    def copy() -> None:
        there[:] = payload
        back[:] = there

    return copy


def _plain(record: Trajectory) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if not isinstance(value, bytes)}
