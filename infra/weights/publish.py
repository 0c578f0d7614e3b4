"""Publishing a version: blobs, then the manifest, then the announcement; a reader never sees half of it.

Files are given as bytes already serialised, or as paths. What the parent already holds is not sent again; its
configuration and tokenizer files are carried forward without anybody giving them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

from infra.store import ObjectStore
from infra.weights.adapter import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from infra.weights.header import read_header
from infra.weights.manifest import (
    INDEX_NAME,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    allowed_file,
    parse,
    sha256,
    tensor_entries,
)
from schemas.errors import ObjectMissing, StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Announcement

NUM_STREAMS = 4
"""Blobs on their way at once: several whole objects are faster than the parts of one."""


class Known(NamedTuple):
    """A file that was read before, so that it is not read and hashed again for each version."""

    entry: FileEntry
    tensors: list[TensorEntry]
    make: Callable[[], bytes]
    """Its bytes once more, for a store that lacks them."""


Source: TypeAlias = bytes | Path | Known
"""Where a file's bytes come from; paths are read when needed."""


class Published(NamedTuple):
    """What `publish` made: the manifest is the parent of the next version."""

    manifest: Manifest
    announcement: Announcement
    num_uploaded: int
    uploaded_bytes: int


def publish(
    store: ObjectStore,
    announce: Callable[[Announcement], object] | None,
    *,
    run: str,
    policy: str,
    epoch: int,
    nonce: str,
    version: int,
    step: int,
    files: Mapping[str, Source],
    parent: Manifest | None,
    plan_offset: int = -1,
    created_by: str = "",
) -> Published:
    """Publish a version whole: every blob, then the manifest, then `announce` (which must wait for its acknowledgement).

    All safetensors files of the version must be among `files`; the parent's other files need not be. May be called
    again after any error: what is there already is not sent twice. Raises StoreError, or WeightsError when the
    version stands there already with other content or the files are not what an engine may load.
    """
    given = dict(files)
    manifest = make_manifest(
        run=run, policy=policy, epoch=epoch, nonce=nonce, version=version, step=step, plan_offset=plan_offset,
        given=given, parent=parent, created_by=created_by,
    )  # fmt: skip
    sent = _upload(store, manifest, given, parent)
    _put_manifest(store, manifest)
    announcement = Announcement(
        run=run, policy=policy, epoch=epoch, nonce=nonce, version=version, manifest_key=manifest.key,
        manifest_digest=manifest.digest, size_bytes=manifest.size_bytes,
    )  # fmt: skip
    if announce is not None:
        announce(announcement)
    return Published(manifest, announcement, len(sent), sum(sent))


def make_manifest(
    *,
    run: str,
    policy: str,
    epoch: int,
    nonce: str,
    version: int,
    step: int,
    plan_offset: int,
    given: dict[str, Source],
    parent: Manifest | None,
    created_by: str,
) -> Manifest:
    """The manifest of these files and those carried forward. Adds the index to `given` when there are several shards."""
    read = {name: _read(name, source) for name, source in given.items()}
    tensors = [tensor for entry in read.values() for tensor in entry[1]]
    if not tensors:
        raise WeightsError(f"{run}/{policy} {epoch}-{version}: no safetensors file with tensors among {sorted(given)}")
    shards = {tensor.file for tensor in tensors} - {ADAPTER_NAME}
    if len(shards) > 1 and INDEX_NAME not in given:
        indexed = [tensor for tensor in tensors if tensor.file in shards]
        given[INDEX_NAME] = _index(indexed, sum(read[name][0].size_bytes for name in shards))
        read[INDEX_NAME] = _read(INDEX_NAME, given[INDEX_NAME])
    carried = {entry.name: entry for entry in parent.files if _carried(entry.name)} if parent else {}
    entries = carried | {name: entry for name, (entry, _) in read.items()}
    return Manifest(
        run=run, policy=policy, epoch=epoch, nonce=nonce, version=version, step=step, plan_offset=plan_offset,
        parent=parent.name if parent else None, parent_digest=parent.digest if parent else "",
        files=tuple(sorted(entries.values())), tensors=tuple(sorted(tensors)), created_by=created_by,
    )  # fmt: skip


def model_files(folder: Path) -> dict[str, Path]:
    """Files of a model folder that belong to a version: safetensors, configuration, tokenizer, chat template.

    Others (code, pickles, licences) are left where they are. Raises WeightsError when nothing loadable is there.
    """
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and allowed_file(path.name)}
    if "config.json" not in found or not any(name.endswith(".safetensors") for name in found):
        raise WeightsError(
            f"{folder} holds {', '.join(found) or 'no usable file'}: a model needs config.json and *.safetensors "
            "(convert other formats first; pickles are never read)"
        )
    return found


def known(name: str, data: bytes, make: Callable[[], bytes]) -> Known:
    """A file that is read once for many versions. `make` gives the same bytes again."""
    return Known(*_read(name, data), make)


def _bytes(source: Source) -> bytes:
    """A file's bytes; paths are read when needed, so that a large model is never in memory as a whole."""
    if isinstance(source, Known):
        data = source.make()
        if sha256(data) != source.entry.sha256:
            raise WeightsError(f"{source.entry.name} has changed since it was read; weights of a base never change")
        return data
    return source.read_bytes() if isinstance(source, Path) else source


def _read(name: str, source: Source) -> tuple[FileEntry, list[TensorEntry]]:
    if isinstance(source, Known):
        return source.entry, source.tensors
    data = _bytes(source)
    entry = FileEntry(name, sha256(data), len(data))
    return entry, tensor_entries(name, data, read_header(data, what=name)) if name.endswith(".safetensors") else []


def _carried(name: str) -> bool:
    return not name.endswith(".safetensors") and name not in (INDEX_NAME, ADAPTER_CONFIG_NAME)


def _index(tensors: Iterable[TensorEntry], size_bytes: int) -> bytes:
    """The file by which loaders find the shard of a tensor."""
    table = {"metadata": {"total_size": size_bytes}, "weight_map": {t.name: t.file for t in sorted(tensors)}}
    return json.dumps(table, indent=1).encode()


def _upload(store: ObjectStore, manifest: Manifest, given: Mapping[str, Source], parent: Manifest | None) -> list[int]:
    """Bring every blob into the store; sizes of those sent. The parent's blobs are reused, and no others.

    A blob that only an older version names may be garbage already marked for removal, so it is sent again.
    """
    inherited = {entry.sha256 for entry in parent.files} if parent else set()
    by_digest = {entry.sha256: entry for entry in sorted(manifest.files, key=lambda entry: entry.name in given)}

    def bring(entry: FileEntry) -> int | None:
        key = blob_key(manifest.run, manifest.policy, entry.sha256)
        if entry.sha256 in inherited and store.size(key) == entry.size_bytes:
            return None
        if entry.name not in given:
            raise StoreError(
                f"{store!r}: blob {key} of {entry.name}, carried forward from {manifest.parent}, is gone; "
                "give the file again, or restore the bucket"
            )
        store.put(key, _bytes(given[entry.name]))
        return entry.size_bytes

    with ThreadPoolExecutor(NUM_STREAMS, "publish") as pool:
        return [size for size in pool.map(bring, by_digest.values()) if size is not None]


def _put_manifest(store: ObjectStore, manifest: Manifest) -> None:
    """Write the manifest; a whole one of other content under the same name is never replaced."""
    if store.put(manifest.key, manifest.data, if_absent=True):
        return
    try:
        there = store.get(manifest.key, max_bytes=MAX_MANIFEST_BYTES)
    except ObjectMissing:
        there = b""
    if there == manifest.data:
        return
    if _whole(there):
        raise WeightsError(
            f"{store!r}: {manifest.key} is there already with other content: versions never change. "
            "Publish under the next version, or under a new epoch"
        )
    store.put(manifest.key, manifest.data)


def _whole(data: bytes) -> bool:
    try:
        parse(data)
    except WeightsError:
        return False
    return True
