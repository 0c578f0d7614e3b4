"""Checkpoints in the bucket: sent after they stand on disk, fetched where a trainer finds none that counts on its disk.

    <run>/<policy>/checkpoints/ck-<epoch>-<version>-<n>/   the same files as on disk, COMMIT sent last

What is fetched is checked as any checkpoint on disk is: no byte of the bucket is trusted, and none runs code.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from infra.store import ObjectStore
from schemas.errors import ObjectMissing, StoreError, WeightsError
from trainers import checkpoint
from trainers.checkpoint import COMMIT, META, Checkpoint, Meta, Order

_LOG = structlog.get_logger("offsetrl.checkpoint")


def prefix_of(run: str, policy: str) -> str:
    """Where a policy's checkpoints stand in the bucket.

    >>> prefix_of("demo", "main")
    'demo/main/checkpoints/'
    """
    return f"{run}/{policy}/checkpoints/"


def send(store: ObjectStore, prefix: str, folder: Path, *, keep: int) -> None:
    """Store a checkpoint of the disk, COMMIT last, and remove all but the newest `keep`. Raises StoreError, OSError."""
    names = sorted(path.name for path in folder.iterdir() if path.name != COMMIT)
    for name in [*names, COMMIT]:
        store.put(f"{prefix}{folder.name}/{name}", (folder / name).read_bytes())
    whole = sorted(_whole(store, prefix), reverse=True)
    for _, name in whole[max(keep, 1) :]:
        store.delete([f"{prefix}{name}/{COMMIT}"])  # first out of sight, so that half of it is never looked at
        store.delete([info.key for info in store.list(f"{prefix}{name}/")])


def fetch_newest(
    store: ObjectStore, prefix: str, root: Path, objection: Callable[[Meta], str | None]
) -> Checkpoint | None:
    """The newest checkpoint of the bucket to which there is no objection, brought to the disk; None where there is none.

    Raises StoreError.
    """
    for _, name in sorted(_whole(store, prefix), reverse=True):
        try:
            reason = objection(checkpoint.read_meta(_small(store, f"{prefix}{name}/{META}")))
            if reason is None:
                return _bring(store, f"{prefix}{name}/", root / name)
        except (WeightsError, ObjectMissing) as error:
            reason = str(error)
        _LOG.warning("checkpoint in the bucket passed over", name=name, reason=reason)
    return None


def _bring(store: ObjectStore, prefix: str, target: Path) -> Checkpoint:
    """One checkpoint, whole and checked, under its name. Raises WeightsError, StoreError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-fetched-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        for name, size in checkpoint.files_of(_small(store, prefix + META)).items():
            (temporary / name).write_bytes(store.get(prefix + name, max_bytes=size))
        for name in (META, COMMIT):
            (temporary / name).write_bytes(_small(store, prefix + name))
        checkpoint.read(temporary)
        shutil.rmtree(target, ignore_errors=True)  # one of that name on the disk was passed over
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return checkpoint.read(target)


def _small(store: ObjectStore, key: str) -> bytes:
    return store.get(key, max_bytes=checkpoint.MAX_META_BYTES)


def _whole(store: ObjectStore, prefix: str) -> Iterator[tuple[Order, str]]:
    for info in store.list(prefix):
        name, _, file = info.key.removeprefix(prefix).partition("/")
        if file == COMMIT and (order := checkpoint.order_of(name)) is not None:
            yield order, name


class Uploads:
    """Sends checkpoints from a thread of its own; of several that wait only the newest is sent."""

    def __init__(self, store: ObjectStore, prefix: str, keep: int) -> None:
        self._store, self._prefix, self._keep = store, prefix, keep
        self._waiting: Path | None = None
        self._wake = threading.Condition()
        self._closed = False
        self.sent: list[str] = []
        """Names of what stands in the bucket by this trainer, oldest first."""
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def put(self, folder: Path) -> None:
        """Send this one next."""
        with self._wake:
            self._waiting = folder
            self._wake.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait a while for what is being sent; what is not sent stays on the disk."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _LOG.warning("the newest checkpoint is not in the bucket; it stays on the disk", limit_s=timeout_s)

    def _run(self) -> None:
        while (folder := self._next()) is not None:
            try:
                send(self._store, self._prefix, folder, keep=self._keep)
                self.sent.append(folder.name)
            except (StoreError, OSError) as error:  # the next one may come through; the disk has them all
                _LOG.warning("checkpoint not sent to the bucket", name=folder.name, error=str(error))

    def _next(self) -> Path | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting is not None or self._closed)
            folder, self._waiting = self._waiting, None
            return folder
