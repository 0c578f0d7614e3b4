"""Bench `codec`: a trajectory's way to bytes and back, against Avro arrays, JSON and a plain copy of memory.

Columns: token ids, loss mask, log-probs and versions alone, from numpy arrays (ours) or lists (the others) to bytes and
back to the same. Record: the whole trajectory with its metadata, from the dataclass to bytes and back to the dataclass; both Avro
sides hold the columns in their own form, packed or as lists. One call = one encode and one decode.

T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass, replace
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
from schemas.records import Finish, Role, Sampling, Segment, Status, Trajectory, VersionRun
from schemas.seeds import derive_seed
from schemas.wire import BYTES, pack_segments, pack_versions, unpack_segments, unpack_versions
from support.samples import trajectory

TARGETS = {("columns", 512): 25.0, ("columns", 4096): 100.0, ("record", 512): 7.0, ("record", 4096): 40.0}
NUM_RECORDS = 64
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

    def write() -> bytes:
        parts: list[bytes] = []
        tokens, mask, logprobs = pack_ints(columns.tokens), pack_bits(columns.loss_mask), pack_floats(columns.logprobs)
        BYTES.write((tokens, mask, logprobs, pack_versions(columns.versions)), parts.extend)
        return b"".join(parts)

    def read(data: bytes) -> object:
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
        Side("ours", lambda: read(write()), len(write())),
        Side("avro arrays", lambda: _read(arrays, _write(arrays, lists)), len(_write(arrays, lists))),
        Side("json", lambda: json.loads(json.dumps(lists)), len(json.dumps(lists))),
        Side("memcpy", _copy(columns)),
        Side("(lists to packed columns alone)", from_lists),
    ]


def record_sides(columns: Columns) -> list[Side]:
    """The whole trajectory, of another group and index in every call."""
    records = [make_record(columns, number) for number in range(NUM_RECORDS)]
    rival = ArrayRecords(columns)
    arrays = [rival.record(record) for record in records]
    texts = [rival.plain(record) for record in arrays]
    ours, packing, theirs = itertools.cycle(records), itertools.cycle(records), itertools.cycle(arrays)
    plain = itertools.cycle(texts)
    count = len(columns.tokens)

    def with_columns() -> object:
        tokens, mask, logprobs = pack_ints(columns.tokens), pack_bits(columns.loss_mask), pack_floats(columns.logprobs)
        filled = replace(next(packing), tokens=tokens, loss_mask=mask, logprobs=logprobs)
        read = codec.decode(codec.encode(filled))
        assert isinstance(read, Trajectory)
        return unpack_ints(read.tokens), unpack_bits(read.loss_mask, count), unpack_floats(read.logprobs)

    return [
        Side("ours", lambda: codec.decode(codec.encode(next(ours))), len(codec.encode(records[0]))),
        Side("ours, with replace, pack and unpack", with_columns),
        Side("avro arrays", lambda: rival.decode(rival.encode(next(theirs))), len(rival.encode(arrays[0]))),
        Side("json", lambda: json.loads(json.dumps(next(plain))), len(json.dumps(texts[0]))),
        Side("memcpy", _copy(columns)),
    ]


def make_record(columns: Columns, number: int) -> Trajectory:
    """The example trajectory with these columns in it, as member of group `number`."""
    return trajectory(
        group=f"g{number:08d}",
        index=number % 8,
        item=1000 + number,
        seed=derive_seed(0, "main", number),
        first_request_time_ms=1_790_000_000_000 + 977 * number,
        reward=number / NUM_RECORDS,
        tokens=pack_ints(columns.tokens),
        loss_mask=pack_bits(columns.loss_mask),
        logprobs=pack_floats(columns.logprobs),
        versions=columns.versions,
        segments=columns.segments,
    )


class ArrayRecords:
    """The rival: the trajectory's own schema with its four columns as Avro arrays, and a record that holds lists.

    Written as one writes it with fastavro and a dataclass: a dict of the fields there, the constructor back. It checks
    nothing but what fastavro checks.
    """

    def __init__(self, columns: Columns) -> None:
        tree = json.loads(codec.schema_text(Trajectory))
        for field in tree["fields"]:
            field["type"] = ARRAY_TYPES.get(field["name"], field["type"])
        self.columns = columns
        self.names = [field["name"] for field in tree["fields"]]
        self.schema = fastavro.parse_schema(tree)

    def record(self, record: Trajectory) -> Trajectory:
        """The same record with lists in it."""
        return replace(record, **self.columns.lists())  # type: ignore[arg-type]

    def plain(self, record: Trajectory) -> dict[str, Any]:
        """The record as a dict of lists, dicts and scalars."""
        datum = {name: getattr(record, name) for name in self.names}
        sampling = record.sampling
        datum["sampling"] = {name: getattr(sampling, name) for name in sampling.__slots__}
        datum["segments"] = record.segments
        return datum

    def encode(self, record: Trajectory) -> bytes:
        """Record to bytes."""
        datum = self.plain(record)
        datum["segments"] = pack_segments(record.segments)
        return _write(self.schema, datum)

    def decode(self, data: bytes) -> Trajectory:
        """Bytes to record."""
        datum = _read(self.schema, data)
        datum["sampling"] = Sampling(**datum["sampling"])
        datum["status"] = Status(datum["status"])
        datum["finish"] = Finish(datum["finish"])
        datum["step_rewards"] = tuple(datum["step_rewards"])
        datum["segments"] = unpack_segments(datum["segments"])
        return Trajectory(**datum)


ARRAY_TYPES: dict[str, Any] = {
    "tokens": {"type": "array", "items": "int"},
    "loss_mask": {"type": "array", "items": "boolean"},
    "logprobs": {"type": "array", "items": "float"},
    "versions": {"type": "array", "items": "int"},
}


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
