"""Fetching a version into a folder of its own: every file checked by size, SHA-256 and header before the folder appears.

Under the root (of one process alone) stand `<epoch>-<version>` for whole versions, each with its manifest beside the
files, and `.part-<epoch>-<version>` for one that is being fetched; a fetch that was cut goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.store import ObjectStore
from infra.weights.adapter import MERGED
from infra.weights.header import header_length, read_header
from infra.weights.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, parse, sha256
from schemas.errors import WeightsError
from schemas.names import blob_key, manifest_key, manifests_prefix, parse_manifest_key
from schemas.records import Version

NUM_STREAMS = 4
DEFAULT_MAX_BYTES = 2**40
_WHOLE = re.compile(r"(\d{1,10})-(\d{1,12})")


def load_manifest(store: ObjectStore, run: str, policy: str, name: Version, digest: str = "") -> Manifest:
    """The manifest of a version, checked against `digest` (of its announcement) when one is given.

    Raises ObjectMissing, StoreError, or WeightsError when it is not what was announced or speaks of another version.
    """
    key = manifest_key(run, policy, name.epoch, name.version)
    data = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    if digest and sha256(data) != digest:
        raise WeightsError(f"{store!r}: {key} has digest {sha256(data)[:16]}, but {digest[:16]} was announced")
    manifest = parse(data)
    if (manifest.run, manifest.policy, manifest.name) != (run, policy, name):
        raise WeightsError(f"{store!r}: {key} is the manifest of {manifest.run}/{manifest.policy} {manifest.name}")
    return manifest


def listed(store: ObjectStore, run: str, policy: str) -> list[Version]:
    """Versions whose manifests stand in the bucket, newest first; nothing is said about their content."""
    keys = (parse_manifest_key(info.key) for info in store.list(manifests_prefix(run, policy)))
    return sorted((Version(*name) for name in keys if name is not None), reverse=True)


def fetch(store: ObjectStore, manifest: Manifest, digest: str, root: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> Path:
    """The folder of a version under `root`, fetched and verified; at once when it is there already.

    Files that an older folder holds are hard-linked (and checked again). Raises WeightsError when anything differs
    from the manifest, StoreError when the store is away; in both cases no folder appears and a further call goes on.
    """
    if manifest.digest != digest:
        raise WeightsError(f"manifest of {manifest.name} has digest {manifest.digest[:16]}, not {digest[:16]}")
    if manifest.size_bytes > max_bytes:
        raise WeightsError(f"version {manifest.name} has {manifest.size_bytes} bytes, at most {max_bytes} are accepted")
    target, part = root / str(manifest.name), root / f".part-{manifest.name}"
    if _is_whole(target, manifest):
        return target
    _remove(target)
    part.mkdir(parents=True, exist_ok=True)
    _drop_strangers(part, manifest)
    held = _held(root)
    with ThreadPoolExecutor(NUM_STREAMS, "fetch") as pool:
        list(pool.map(lambda entry: _bring(store, manifest, entry, part / entry.name, held), manifest.files))
    _write(part / MANIFEST_NAME, manifest.data)
    _sync(part)
    part.rename(target)
    _sync(root)
    return target


def fetched(root: Path) -> list[Version]:
    """Whole versions under `root`, newest first."""
    if not root.is_dir():
        return []
    matches = (_WHOLE.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted((Version(int(m[1]), int(m[2])) for m in matches if m), reverse=True)


def prune(root: Path, *, keep: int, in_use: Collection[Version] = ()) -> list[Version]:
    """Remove all but the newest `keep` versions and those in use; what is half fetched and not newer goes too."""
    whole = fetched(root)
    gone = [name for name in whole[keep:] if name not in in_use]
    for name in gone:
        _remove(root / str(name))
        shutil.rmtree(root / MERGED / str(name), ignore_errors=True)
    for path in root.glob(".*-*"):
        match = _WHOLE.search(path.name)
        if match and whole and (path.name.startswith(".gone-") or Version(int(match[1]), int(match[2])) <= whole[0]):
            shutil.rmtree(path, ignore_errors=True)
    return gone


def verify_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    """Raise WeightsError unless the file is the one in the manifest: size, SHA-256, and its tensors' names and shapes."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if entry.name.endswith(".safetensors"):
            start += file.read(header_length(start, size_bytes=size_bytes, what=entry.name))
        file.seek(0)
        _check(manifest, entry, size_bytes, hashlib.file_digest(file, "sha256").hexdigest(), start, str(path))


def _check(manifest: Manifest, entry: FileEntry, size_bytes: int, digest: str, start: bytes, where: str) -> None:
    """`start` holds at least the header of a safetensors file."""
    if (size_bytes, digest) != (entry.size_bytes, entry.sha256):
        raise WeightsError(
            f"{entry.name} of {manifest.run}/{manifest.policy} {manifest.name}: {where} has {size_bytes} bytes with "
            f"SHA-256 {digest[:16]}; the manifest says {entry.size_bytes} with {entry.sha256[:16]}"
        )
    if entry.name.endswith(".safetensors"):
        tensors = read_header(start, size_bytes=size_bytes, what=entry.name)
        if [(t.name, t.dtype, t.shape) for t in tensors] != manifest.tensors_of(entry.name):
            raise WeightsError(f"{entry.name} of {manifest.name}: its tensors are not those of the manifest")


def _bring(store: ObjectStore, manifest: Manifest, entry: FileEntry, path: Path, held: dict[str, Path]) -> None:
    """Have one verified file at `path`: from a fetch that was cut, from an older folder, or from the store."""
    if _verifies(path, entry, manifest):
        return
    if entry.sha256 in held:
        with contextlib.suppress(OSError):  # another file system, or one without links: download instead
            path.hardlink_to(held[entry.sha256])
            if _verifies(path, entry, manifest):
                return
    key = blob_key(manifest.run, manifest.policy, entry.sha256)
    data = store.get(key, max_bytes=entry.size_bytes)
    _check(manifest, entry, len(data), sha256(data), data, f"{store!r}: {key}")
    _write(path, data)


def _verifies(path: Path, entry: FileEntry, manifest: Manifest) -> bool:
    """Whether the right file is there; a wrong one is removed."""
    if not path.exists():
        return False
    try:
        verify_file(path, entry, manifest)
    except WeightsError:
        path.unlink()
        return False
    return True


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the folder holds exactly this version. Files are hashed again: a disk may have spoilt them since."""
    try:
        if (folder / MANIFEST_NAME).read_bytes() != manifest.data:
            return False
        for entry in manifest.files:
            verify_file(folder / entry.name, entry, manifest)
    except (OSError, WeightsError):
        return False
    return {path.name for path in folder.iterdir()} == {entry.name for entry in manifest.files} | {MANIFEST_NAME}


def _held(root: Path) -> dict[str, Path]:
    """Files of the whole versions under `root`, by digest as their manifests say."""
    return {
        entry.sha256: root / str(name) / entry.name for name in fetched(root) for entry in _entries(root / str(name))
    }


def _entries(folder: Path) -> Iterator[FileEntry]:
    with contextlib.suppress(OSError, WeightsError):
        yield from parse((folder / MANIFEST_NAME).read_bytes()).files


def _drop_strangers(part: Path, manifest: Manifest) -> None:
    """Remove what another version of the same number left in the folder."""
    for path in part.iterdir():
        if manifest.file(path.name) is None:
            path.unlink()


def _remove(folder: Path) -> None:
    """Remove a whole version: under another name first, so that half of it never looks whole."""
    if folder.exists():
        gone = folder.with_name(f".gone-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole and durably: temporary name, sync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
