"""DAEMON `offsetrl mirror --region NAME`: one policy's weights from the main bucket into a region's.

consumes    manifests and blobs in the bucket of [s3]
produces    the same objects in the bucket of [regions.NAME], every one checked; a manifest last
waits for   a version that the region does not have
after a crash   goes on: blobs that are there stay, and a version without its manifest is invisible to everybody
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog

from infra.daemon import Daemon
from infra.store import ObjectStore
from infra.weights.fetch import listed, load_manifest
from infra.weights.manifest import FileEntry, Manifest, sha256
from infra.weights.publish import NUM_STREAMS
from schemas.errors import DependencyError, SettingError, WeightsError
from schemas.names import blob_key
from schemas.records import Version

NEWEST = 3
"""Versions mirrored: the newest, and a few behind it for evaluations and for readers in the middle of a fetch."""
POLL_S = 1.0


class Copied(NamedTuple):
    """What a round brought over."""

    versions: tuple[Version, ...]
    num_blobs: int
    size_bytes: int


def run(daemon: Daemon) -> int:
    """Mirror until told to stop; trouble is said once, and tried again."""
    from infra.wiring import open_store  # boto3

    if not daemon.region:
        raise SettingError("mirror needs --region NAME, with the region's bucket in [regions.NAME]")
    source, logger, trouble = open_store(daemon.settings, ""), structlog.get_logger("offsetrl"), ""
    while not daemon.stop.requested:
        try:
            copied = mirror_once(source, daemon.store, daemon.settings.run.name, daemon.policy, newest=NEWEST, limit=1)
            trouble = ""
        except (DependencyError, WeightsError) as error:
            copied = Copied((), 0, 0)
            if not trouble:
                logger.warning("mirroring fails; trying again", error=str(error))
            trouble = str(error)
        for version in copied.versions:
            logger.info("mirrored", version=str(version), num_blobs=copied.num_blobs, size_bytes=copied.size_bytes)
        if not copied.versions:
            daemon.stop.wait(POLL_S * (5 if trouble else 1))
    return 0


def mirror_once(
    source: ObjectStore, target: ObjectStore, run: str, policy: str, *, newest: int = NEWEST, limit: int | None = None
) -> Copied:
    """Copy the newest versions that `target` lacks, newest first, at most `limit` of them.

    A version whose bytes are not what its manifest says does not reach the target; the others do, and then
    WeightsError is raised. Raises StoreError when a store is away; what was copied stays, and a further call goes on.
    """
    there = set(listed(target, run, policy))
    wanted = [name for name in listed(source, run, policy)[:newest] if name not in there][:limit]
    copied, refused = Copied((), 0, 0), []
    for name in wanted:
        try:
            num_blobs, size_bytes = _copy(source, target, load_manifest(source, run, policy, name))
        except WeightsError as error:
            refused.append(str(error))
            continue
        copied = Copied((*copied.versions, name), copied.num_blobs + num_blobs, copied.size_bytes + size_bytes)
    if refused:
        raise WeightsError("not mirrored: " + "; ".join(refused))
    return copied


def _copy(source: ObjectStore, target: ObjectStore, manifest: Manifest) -> tuple[int, int]:
    """Bring a version over: blobs, then its manifest. Returns number and bytes of the blobs sent."""

    def bring(entry: FileEntry) -> int:
        key = blob_key(manifest.run, manifest.policy, entry.sha256)
        if target.size(key) == entry.size_bytes:
            return 0
        data = source.get(key, max_bytes=entry.size_bytes)
        if len(data) != entry.size_bytes or sha256(data) != entry.sha256:
            raise WeightsError(f"{source!r}: {key}, {entry.name} of {manifest.name}, is not what the manifest says")
        target.put(key, data)
        return entry.size_bytes

    with ThreadPoolExecutor(NUM_STREAMS, "mirror") as pool:
        sizes = list(pool.map(bring, {entry.sha256: entry for entry in manifest.files}.values()))
    target.put(manifest.key, manifest.data)
    return sum(size > 0 for size in sizes), sum(sizes)
