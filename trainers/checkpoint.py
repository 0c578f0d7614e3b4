"""Checkpoints: model, optimiser, random state and positions on the log as one folder that is whole or not there.

    ck-<epoch>-<version>-<n>/   model.safetensors optimizer.safetensors rng.safetensors meta.json COMMIT

Files are written under a temporary name, synced, and the folder is renamed; COMMIT holds the digest of meta.json, which
holds the digest of every file. A folder that fails any of it is passed over with the reason, and the one before it is
taken. Order is by (epoch, version, n), never by time. n counts saves of one version: positions can move while the
weights do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import structlog
from safetensors import SafetensorError
from torch import Tensor

from schemas.errors import WeightsError
from trainers.backlog import SamplesPosition

FORMAT = 1
META, COMMIT = "meta.json", "COMMIT"
MAX_META_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"ck-(\d{4,})-(\d{8,})-(\d+)")
_PART = re.compile(r"[a-z]{1,32}")
_LOG = structlog.get_logger("offsetrl.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a checkpoint says about itself."""

    run: str
    policy: str
    epoch: int
    """Of the owner that planned the last step; 0 before the first."""
    version: int
    """Completed steps."""
    plan_step: int
    """Of the last plan executed; -1 for none."""
    plan_offset: int
    """Of that plan on `steps`; -1 for none."""
    plan_digest: str
    """SHA-256 of that plan's record; empty for none."""
    steps_offset: int
    """Next offset of `steps`."""
    samples: Mapping[int, SamplesPosition]
    """By partition: where `samples` must be read from, and the closing offset before that place."""
    base: str = ""
    """SHA-256 over the frozen weights that an adapter was trained on; empty: there is no adapter."""


class Order(NamedTuple):
    """Which checkpoint is newer."""

    epoch: int
    version: int
    save: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    meta: Meta
    digests: Mapping[str, str]
    """SHA-256 by part."""

    def load(self) -> dict[str, dict[str, Tensor]]:
        """Its tensors by part and name. Raises WeightsError when a file has changed since it was found."""
        return {part: self._part(part, digest) for part, digest in self.digests.items()}

    def _part(self, part: str, digest: str) -> dict[str, Tensor]:
        path = self.folder / f"{part}.safetensors"
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise WeightsError(f"{path} changed while it was read; start again to take the checkpoint before it")
        try:
            return safetensors.torch.load(data)
        except SafetensorError as error:
            raise WeightsError(f"{path} has the right digest but cannot be read: {error}") from error


def save(root: Path, meta: Meta, tensors: Mapping[str, Mapping[str, Tensor]], *, keep: int) -> Path:
    """Write a checkpoint, whole or not at all, and remove all but the newest `keep`. Raises OSError (a full disk).

    tensors: by part ("model", "optimizer", "rng") and name; no two of a part may share memory.
    """
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        _write_all(temporary, meta, tensors)
        folder = _rename(root, temporary, meta)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _remove_old(root, keep, folder)
    return folder


def newest_eligible(root: Path, objection: Callable[[Meta], str | None]) -> Checkpoint | None:
    """The newest whole checkpoint to which there is no `objection` (a text saying why not).

    What is passed over is logged with its reason. None: there is no such checkpoint.
    """
    for _, folder in sorted(_folders(root), reverse=True):
        try:
            checkpoint = read(folder)
            reason = objection(checkpoint.meta)
        except WeightsError as error:
            reason = str(error)
        if reason is None:
            return checkpoint
        _LOG.warning("checkpoint passed over", folder=str(folder), reason=reason)
    return None


def read(folder: Path) -> Checkpoint:
    """A checkpoint, checked byte for byte. Raises WeightsError saying what is wrong with it."""
    data, committed = _small(folder / META), _small(folder / COMMIT)
    if hashlib.sha256(data).hexdigest().encode() != committed:
        raise WeightsError(f"{folder / 'meta.json'} is not what COMMIT says")
    try:
        meta, files = _parse(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / 'meta.json'} cannot be used: {type(error).__name__}: {error}") from error
    for part, (size, digest) in files.items():
        path = folder / f"{part}.safetensors"
        if not path.is_file() or path.stat().st_size != size:
            got = path.stat().st_size if path.is_file() else "none"
            raise WeightsError(f"{path} should have {size} bytes and has {got}")
        if _file_digest(path) != digest:
            raise WeightsError(f"{path} is not what meta.json says: its digest differs")
    return Checkpoint(folder, meta, {part: digest for part, (_, digest) in files.items()})


def read_meta(data: bytes) -> Meta:
    """What the bytes of a meta.json say. Raises WeightsError."""
    return _parsed(data, META)[0]


def files_of(data: bytes) -> dict[str, int]:
    """Names and sizes in bytes of the tensor files that a meta.json speaks of. Raises WeightsError."""
    return {f"{part}.safetensors": size for part, (size, _) in _parsed(data, META)[1].items()}


def order_of(name: str) -> Order | None:
    """The order of a checkpoint's folder; None for another name.

    >>> order_of("ck-0002-00000017-1")
    Order(epoch=2, version=17, save=1)
    """
    match = _NAME.fullmatch(name)
    return Order(int(match[1]), int(match[2]), int(match[3])) if match else None


# Writing -----------------------------------------------------------------------------------------------------------


def _write_all(folder: Path, meta: Meta, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    files: dict[str, dict[str, Any]] = {}
    for part, named in tensors.items():
        assert _PART.fullmatch(part), part
        data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})
        _write(folder / f"{part}.safetensors", data)
        files[part] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body = asdict(meta) | {
        "format": FORMAT,
        "files": files,
        "samples": {str(partition): list(position) for partition, position in meta.samples.items()},
    }
    text = json.dumps(body, sort_keys=True, indent=1).encode()
    _write(folder / META, text)
    _write(folder / COMMIT, hashlib.sha256(text).hexdigest().encode())
    _sync_folder(folder)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make names durable: syncing a file does not sync its entry in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(root: Path, temporary: Path, meta: Meta) -> Path:
    saves = [order.save for order, _ in _folders(root) if (order.epoch, order.version) == (meta.epoch, meta.version)]
    folder = root / f"ck-{meta.epoch:04}-{meta.version:08}-{max(saves, default=0) + 1}"
    temporary.rename(folder)
    _sync_folder(root)
    return folder


def _remove_old(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the `keep` newest, never the one just written, and what crashed writers left behind."""
    for _, folder in sorted(_folders(root), reverse=True)[max(keep, 1) :]:
        if folder != newest:
            hidden = root / f".tmp-removed-{secrets.token_hex(4)}"
            folder.rename(hidden)  # first out of sight, so that half of it is never looked at
    for left in root.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


# Reading -----------------------------------------------------------------------------------------------------------


def _folders(root: Path) -> Iterator[tuple[Order, Path]]:
    for folder in root.iterdir() if root.is_dir() else ():
        order = order_of(folder.name)
        if order is not None and folder.is_dir():
            yield order, folder


def _small(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_META_BYTES + 1)
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing") from error
    if len(data) > MAX_META_BYTES:
        raise WeightsError(f"{path} is larger than {MAX_META_BYTES} bytes")
    return data


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parsed(data: bytes, where: str) -> tuple[Meta, dict[str, tuple[int, str]]]:
    try:
        return _parse(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{where} cannot be used: {type(error).__name__}: {error}") from error


def _parse(body: dict[str, Any]) -> tuple[Meta, dict[str, tuple[int, str]]]:
    if body.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    files = {part: (int(entry["size_bytes"]), str(entry["sha256"])) for part, entry in body.pop("files").items()}
    if any(not _PART.fullmatch(part) for part in files):
        raise ValueError("a file of it has a name that no checkpoint has")
    samples = {int(partition): SamplesPosition(*map(int, place)) for partition, place in body.pop("samples").items()}
    return Meta(**body, samples=samples), files
