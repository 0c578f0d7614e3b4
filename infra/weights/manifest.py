"""The manifest of a version: every file and tensor with its digest, as canonical JSON. Its own SHA-256 names the version's content.

A manifest from a bucket is hostile until parsed: sizes, names and counts are limited, unknown and repeated keys are
refused, and only the one canonical spelling is accepted, so equal manifests have equal digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from infra.weights.header import DTYPE_BYTES, MAX_TENSORS, Tensor, is_sizes, strict_json
from schemas.errors import SettingError, WeightsError
from schemas.names import check_name, manifest_key
from schemas.records import Version

FORMAT = 1
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000
INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "offsetrl-manifest.json"
"""Name of the manifest inside a fetched folder; no file of a version may have it."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,198}\.(safetensors|json|txt|jinja|model|tiktoken)")
_HEX = re.compile(r"[0-9a-f]{64}")


class FileEntry(NamedTuple):
    """One file of the version's folder, stored as the blob `sha256`."""

    name: str
    sha256: str
    size_bytes: int


class TensorEntry(NamedTuple):
    """One tensor: where it stands and the digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str


def allowed_file(name: str) -> bool:
    """Whether a file of this name may be part of a version: plain names of data, never of code or pickles.

    >>> allowed_file("model-00001-of-00002.safetensors"), allowed_file("../config.json"), allowed_file("modeling.py")
    (True, False, False)
    """
    return _FILE.fullmatch(name) is not None and name != MANIFEST_NAME and len(name) <= 200


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A version's content. Raises WeightsError when its parts do not fit together."""

    run: str
    policy: str
    epoch: int
    nonce: str
    """Of the trainer's claim."""
    version: int
    step: int
    """The plan whose execution made these weights; -1 for version 0."""
    plan_offset: int = -1
    """Offset of that plan on `steps`; -1 for version 0."""
    parent: Version | None
    parent_digest: str
    """Digest of the parent's manifest; empty without a parent."""
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    created_by: str = ""

    def __post_init__(self) -> None:
        try:
            check_name("run", self.run)
            check_name("policy", self.policy)
        except SettingError as error:
            raise WeightsError(f"manifest: {error}") from error
        _check(0 <= self.epoch < 10**10 and 0 <= self.version < 10**12, f"epoch {self.epoch}, version {self.version}")
        _check(-1 <= self.step < 10**12 and -1 <= self.plan_offset < 2**63, f"step {self.step}")
        _check(
            (self.parent is None) == (self.parent_digest == ""), "a parent needs its digest, and the other way round"
        )
        _check(self.parent is None or _HEX.fullmatch(self.parent_digest) is not None, "parent_digest is no SHA-256")
        _check(self.parent is None or self.parent < self.name, f"parent {self.parent} is not older")
        _check(len(self.nonce) <= 64 and len(self.created_by) <= 200, "nonce or created_by is too long")
        self._check_files()
        self._check_tensors()

    def _check_files(self) -> None:
        _check(0 < len(self.files) <= MAX_FILES, f"{len(self.files)} files; 1 to {MAX_FILES} are allowed")
        for entry in self.files:
            _check(allowed_file(entry.name), f"file name {entry.name[:80]!r} is not allowed")
            _check(_HEX.fullmatch(entry.sha256) is not None, f"{entry.name}: its sha256 is not one")
            _check(0 <= entry.size_bytes < 2**48, f"{entry.name}: size {entry.size_bytes}")
        names = [entry.name.lower() for entry in self.files]  # some file systems do not tell A from a
        _check(len(set(names)) == len(names), "a file name stands twice")
        _check(tuple(sorted(self.files)) == self.files, "the files are not in order of name")

    def _check_tensors(self) -> None:
        _check(len(self.tensors) <= MAX_TENSORS, f"{len(self.tensors)} tensors; at most {MAX_TENSORS} are allowed")
        holders = {entry.name for entry in self.files if entry.name.endswith(".safetensors")}
        for tensor in self.tensors:
            _check(0 < len(tensor.name) <= 500, f"tensor name {tensor.name[:80]!r} is not allowed")
            _check(tensor.dtype in DTYPE_BYTES, f"tensor {tensor.name!r}: dtype {tensor.dtype[:20]!r} is unknown")
            _check(tensor.file in holders, f"tensor {tensor.name!r}: no safetensors file {tensor.file[:80]!r}")
            _check(_HEX.fullmatch(tensor.sha256) is not None, f"tensor {tensor.name!r}: its sha256 is not one")
        names = {tensor.name for tensor in self.tensors}
        _check(len(names) == len(self.tensors), "a tensor stands twice")
        _check(tuple(sorted(self.tensors)) == self.tensors, "the tensors are not in order of name")

    @property
    def name(self) -> Version:
        """(epoch, version)."""
        return Version(self.epoch, self.version)

    @property
    def key(self) -> str:
        """Key in the object store."""
        return manifest_key(self.run, self.policy, self.epoch, self.version)

    @property
    def size_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(entry.size_bytes for entry in self.files)

    @cached_property
    def data(self) -> bytes:
        """Canonical JSON: keys in order, no spaces, ASCII."""
        table: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        table["files"] = [entry._asdict() for entry in self.files]
        table["tensors"] = [entry._asdict() for entry in self.tensors]
        return json.dumps({"format": FORMAT, **table}, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `data`, in hex."""
        return sha256(self.data)

    def file(self, name: str) -> FileEntry | None:
        """The file of that name."""
        return next((entry for entry in self.files if entry.name == name), None)

    def tensors_of(self, file: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of the tensors in a file, in order of name."""
        return [(t.name, t.dtype, t.shape) for t in self.tensors if t.file == file]


_FIELDS = {field.name for field in dataclasses.fields(Manifest)}
_FILE_ROW: dict[str, type] = {"name": str, "sha256": str, "size_bytes": int}
_TENSOR_ROW: dict[str, type] = {"name": str, "dtype": str, "shape": list, "file": str, "sha256": str}


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 in lower-case hex.

    >>> sha256(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(data).hexdigest()


def tensor_entries(file: str, data: bytes, tensors: list[Tensor]) -> list[TensorEntry]:
    """Entries for the tensors of one file, with the digest of each one's bytes."""
    view = memoryview(data)
    return [TensorEntry(t.name, t.dtype, t.shape, file, sha256(view[t.start : t.end])) for t in tensors]


def parse(data: bytes) -> Manifest:
    """The manifest in these bytes. Raises WeightsError for anything but its one canonical spelling."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are accepted")
    table = strict_json(data, what="manifest")
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise WeightsError(f"manifest: not of format {FORMAT}")
    if set(table) != _FIELDS:
        odd = ", ".join(sorted(map(repr, set(table) ^ _FIELDS)))
        raise WeightsError(f"manifest: unknown or missing fields: {odd[:200]}")
    manifest = Manifest(**_typed(table))
    if manifest.data != data:
        raise WeightsError("manifest: not in its canonical spelling")
    return manifest


def _typed(table: dict[str, Any]) -> dict[str, Any]:
    """Fields with the types that Manifest declares; refuses (WeightsError) everything else."""
    for name in ("run", "policy", "nonce", "parent_digest", "created_by"):
        _check(type(table[name]) is str, f"{name} is not text")
    for name in ("epoch", "version", "step", "plan_offset"):
        _check(type(table[name]) is int, f"{name} is not a whole number")
    parent = table["parent"]
    _check(parent is None or (is_sizes(parent) and len(parent) == 2), "parent is not [epoch, version]")
    files, tensors = table["files"], table["tensors"]
    _check(type(files) is list and all(_is_row(row, _FILE_ROW) for row in files), "files have other fields or types")
    _check(
        type(tensors) is list and all(_is_row(row, _TENSOR_ROW) and is_sizes(row["shape"]) for row in tensors),
        "tensors have other fields or types",
    )
    return {
        **table,
        "parent": None if parent is None else Version(*parent),
        "files": tuple(FileEntry(**row) for row in files),
        "tensors": tuple(TensorEntry(**{**row, "shape": tuple(row["shape"])}) for row in tensors),
    }


def _is_row(row: Any, types: dict[str, type]) -> bool:
    return type(row) is dict and {name: type(value) for name, value in row.items()} == types


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise WeightsError(f"manifest: {problem}")
