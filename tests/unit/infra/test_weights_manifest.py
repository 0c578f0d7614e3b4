"""Manifests and safetensors headers: one spelling, strict limits, nothing hostile accepted."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save

from infra.memory_store import MemoryStore
from infra.weights.header import MAX_HEADER_BYTES, read_header
from infra.weights.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry, allowed_file, parse, sha256
from schemas.errors import WeightsError
from schemas.records import Version
from support.weights import model, put, shard

A, B = "a" * 64, "b" * 64
GOOD: dict[str, Any] = {
    "run": "r",
    "policy": "p",
    "epoch": 2,
    "nonce": "n",
    "version": 7,
    "step": 6,
    "parent": Version(1, 6),
    "parent_digest": B,
    "files": (FileEntry("config.json", B, 2), FileEntry("model.safetensors", A, 100)),
    "tensors": (TensorEntry("w", "F32", (2, 3), "model.safetensors", A),),
}


def with_header(table: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def test_a_manifest_survives_the_wire_and_has_one_spelling() -> None:
    manifest = Manifest(**GOOD)
    assert parse(manifest.data) == manifest
    assert manifest.digest == sha256(manifest.data)
    assert manifest.key == "r/p/manifests/2-7.json"
    assert manifest.size_bytes == 102
    for other in (manifest.data + b"\n", manifest.data.replace(b":", b": "), b"\xef\xbb\xbf" + manifest.data):
        with pytest.raises(WeightsError):
            parse(other)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../up"},
        {"policy": "a.b"},
        {"epoch": -1},
        {"version": 10**12},
        {"parent_digest": ""},
        {"parent": None},
        {"parent": Version(2, 7)},
        {"parent": Version(3, 1)},
        {"files": ()},
        {"files": GOOD["files"][::-1]},
        {"files": (*GOOD["files"], FileEntry("model.safetensors", B, 100))},
        {"files": (FileEntry("MODEL.safetensors", B, 1), *GOOD["files"])},
        {"files": (*GOOD["files"], FileEntry("tokenizer.json", "A" * 64, 1))},
        {"files": (*GOOD["files"], FileEntry("tokenizer.json", A, -1))},
        {"tensors": (TensorEntry("w", "F32", (2, 3), "other.safetensors", A),)},
        {"tensors": (TensorEntry("w", "F32", (2, 3), "config.json", A),)},
        {"tensors": (TensorEntry("w", "OBJECT", (2, 3), "model.safetensors", A),)},
        {"tensors": GOOD["tensors"] * 2},
        {"nonce": "x" * 65},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match="manifest: "):
        Manifest(**{**GOOD, **change})


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../config.json", "a/b.json", "/etc/x.json", "a\\b.json", ".hidden.json", "modeling.py", "w.bin", "w.pt",
     "w.pkl", "a\0.json", "config.json\n", "x" * 300 + ".json", MANIFEST_NAME, "c\u00f6nfig.json", "run.sh", "json"],
)  # fmt: skip
def test_only_plain_names_of_data_files_are_allowed(name: str) -> None:
    assert not allowed_file(name)
    with pytest.raises(WeightsError):
        Manifest(**{**GOOD, "files": tuple(sorted((*GOOD["files"], FileEntry(name, A, 1))))})


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "2"},
        {"epoch": True},
        {"epoch": 2.0},
        {"files": {}},
        {"files": [["config.json", B, 2]]},
        {"tensors": [{"name": "w"}]},
        {"tensors": [{"name": "w", "dtype": "F32", "shape": [-1], "file": "model.safetensors", "sha256": A}]},
        {"parent": [1]},
        {"parent": "1-6"},
        {"format": 2},
        {"extra": 1},
        {"run": None},
    ],
)
def test_wrong_types_in_the_json_are_refused(change: dict[str, Any]) -> None:
    table = json.loads(Manifest(**GOOD).data) | change
    with pytest.raises(WeightsError):
        parse(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"epoch":1' + b"0" * 5000 + b"}", b'{"a":NaN}', b'{"a":1,"a":1}'],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        parse(data)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_manifest_is_refused_or_another_one(data: st.DataObject) -> None:
    good = Manifest(**GOOD)
    damaged = bytearray(good.data)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = parse(bytes(damaged))
    except WeightsError:
        return
    assert other.data == bytes(damaged)
    assert (other == good) == (other.digest == good.digest)


def test_the_tensor_table_is_that_of_the_files() -> None:
    manifest = put(MemoryStore(), 3, num_shards=2).manifest
    assert [t.name for t in manifest.tensors] == ["layer1.b", "layer1.w", "layer2.b", "layer2.w"]
    assert {t.dtype for t in manifest.tensors} == {"F32"} and {t.shape for t in manifest.tensors} == {(64, 4)}
    data = model(3, 2)["model-00001-of-00002.safetensors"]
    first = next(t for t in read_header(data) if t.name == "layer1.b")
    assert manifest.tensors[0].sha256 == sha256(data[first.start : first.end])


def test_a_header_is_read_from_the_beginning_of_a_file_alone() -> None:
    data = shard(1)
    length = struct.unpack("<Q", data[:8])[0]
    assert read_header(data[: 8 + length], size_bytes=len(data)) == read_header(data)


def test_every_dtype_and_empty_tensors_are_read() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "a": np.zeros((0, 3), np.int64),
        "b": np.zeros((), np.float16),
        "c": np.ones(5, np.uint8),
        "d": np.ones(2, bool),
    }
    assert [(t.name, t.dtype, t.shape) for t in read_header(save(arrays))] == [
        ("a", "I64", (0, 3)), ("b", "F16", ()), ("c", "U8", (5,)), ("d", "BOOL", (2,)),
    ]  # fmt: skip


def entry(start: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        with_header({}, b"x"),
        with_header({"a": entry(0, 4)}, b"xxx"),
        with_header({"a": entry(0, 4)}, b"xxxxx"),
        with_header({"a": entry(1, 4)}, b"xxxx"),
        with_header({"a": entry(0, 3), "b": entry(2, 4)}, b"xxxx"),
        with_header({"a": entry(0, 2), "b": entry(3, 4)}, b"xxxx"),
        with_header({"a": entry(0, 4, "F32", [2])}, b"xxxx"),
        with_header({"a": entry(0, 4, "F4")}, b"xxxx"),
        with_header({"a": entry(0, 4, "U8", [-2, -2])}, b"xxxx"),
        with_header({"a": entry(0, 4, "U8", [4.0])}, b"xxxx"),
        with_header({"a": entry(0, 4, "U8", [1] * 17)}, b"xxxx"),
        with_header({"a": {**entry(0, 4), "more": 1}}, b"xxxx"),
        with_header({"a": 1}, b"xxxx"),
        with_header([], b""),
        with_header(b'{"a":{},"a":{}}'),
        with_header(b"[" * 50_000),
        with_header({}, length=MAX_HEADER_BYTES + 1),
        with_header({}, length=2**63),
        with_header({}, length=500),
    ],
)
def test_a_hostile_header_is_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        read_header(data)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_header_never_raises_anything_else(at: int, value: int) -> None:
    data = bytearray(shard(1, size=2))
    data[at % len(data)] = value
    with contextlib.suppress(WeightsError):
        read_header(bytes(data))
