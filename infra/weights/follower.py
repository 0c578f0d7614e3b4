"""Follows a policy's weights in a thread of its own and always has the newest verified version ready in a local folder.

Knows: the announcements on the `weights` topic; without a broker, or while the announced version has not reached this
bucket yet, the manifests in the bucket. Fetches the newest only, never goes back, and stays on the old version when
the new one is not what its manifest says. What goes wrong is said once and tried again.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog

from infra.log import Log, Place, Reader
from infra.store import ObjectStore
from infra.weights.adapter import loadable
from infra.weights.announce import Heads, fold_envelopes
from infra.weights.fetch import DEFAULT_MAX_BYTES, fetch, listed, load_manifest, prune
from infra.weights.manifest import Manifest
from schemas.errors import DeadlineExceeded, LogGap, ObjectMissing, OffsetRLError
from schemas.names import manifests_prefix, topic
from schemas.records import Version

_LONGEST_WAIT_S = 3.0
_LIST_EVERY_S = 5.0
"""While a broker serves announcements, the bucket is listed no more often than this."""
_CLOSE_S = 30.0


class FetchedWeights(NamedTuple):
    """A verified version in a local folder, in the Hugging Face layout."""

    version: Version
    folder: Path
    digest: str
    """Of its manifest."""


class Stoppable(Protocol):
    """Whatever knows that the process was asked to stop."""

    @property
    def requested(self) -> bool:
        """True after the first signal."""
        ...


class Follower:
    """Newest weights of (run, policy), fetched in the background under `root`, a folder for this process alone.

    `log` None: the bucket alone. `keep` folders stay on disk besides those taken last.
    """

    def __init__(
        self,
        log: Log | None,
        store: ObjectStore,
        run: str,
        policy: str,
        root: Path,
        poll_s: float = 0.5,
        *,
        keep: int = 2,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._log, self._store, self._run, self._policy = log, store, run, policy
        self._root, self._poll_s, self._keep, self._max_bytes = root, poll_s, keep, max_bytes
        self._place = Place(topic(run, policy, "weights"), 0)
        self._reader: Reader | None = None
        self._heads = Heads(run, policy)
        self._caught_up_at = -1
        self._listed_at = float("-inf")
        self._latest: FetchedWeights | None = None
        self._taken: FetchedWeights | None = None
        self._in_use: tuple[Version, ...] = ()
        self._troubled, self._error = False, ""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._logger = structlog.get_logger("offsetrl").bind(topic=self._place.topic)
        self._thread = threading.Thread(target=self._run_thread, name=f"weights-{policy}", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> FetchedWeights | None:
        """Newest verified version, taken or not."""
        return self._latest

    @property
    def error(self) -> str:
        """What is wrong at present; empty when all is well."""
        return self._error

    @property
    def head(self) -> Version | None:
        """Newest version announced, fetched or not; None when no announcement was read."""
        return self._heads.head.name if self._heads.head else None

    def take(self) -> FetchedWeights | None:
        """Newest verified version if it was not taken yet. Its folder, and that of the one before, stay on disk."""
        with self._changed:
            if self._latest is None or self._latest is self._taken:
                return None
            self._in_use = (self._latest.version, *self._in_use)[:2]
            self._taken = self._latest
            return self._taken

    def wait_first(self, timeout_s: float, stop: Stoppable | None = None) -> FetchedWeights | None:
        """Wait for the first version and take it; None when asked to stop. Raises DeadlineExceeded."""
        limit = time.monotonic() + timeout_s
        while not (stop is not None and stop.requested):
            with self._changed:
                if self._latest is None:
                    self._changed.wait(0.1)
            if (taken := self.take()) is not None:
                return taken
            if time.monotonic() > limit:
                raise DeadlineExceeded(self._waited_for(timeout_s))
        return None

    def close(self) -> None:
        """End the thread; waits a while for a fetch that is under way (what it leaves, the next fetch goes on with)."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _waited_for(self, timeout_s: float) -> str:
        prefix = manifests_prefix(self._run, self._policy)
        from_log = (
            "no broker is followed" if self._log is None else f"newest announced on {self._place.topic}: {self.head}"
        )
        return (
            f"no weights of {self._run}/{self._policy} within {timeout_s} s: waited for a manifest under {prefix} in "
            f"{self._store!r} ({from_log}); last error: {self._error or 'none'}. Is the trainer running?"
        )

    def _run_thread(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            try:
                self._well(self._round())
                wait_s = self._poll_s if self._log is None else 0.0
            except (OffsetRLError, OSError) as error:
                self._trouble(f"{type(error).__name__}: {error}")
                wait_s = min(max(2 * wait_s, self._poll_s), _LONGEST_WAIT_S)
            except Exception as error:  # noqa: BLE001  # the thread's edge: a bug must not end it in silence
                self._trouble(f"bug: {type(error).__name__}: {error}")
                wait_s = min(max(2 * wait_s, self._poll_s), _LONGEST_WAIT_S)
        self._drop_reader()

    def _round(self) -> str:
        """Look once for something newer than what is here, and fetch it; returns what it still waits for."""
        if self._log is None:
            self._take_listed(None)
            return ""
        try:
            self._read(self._log)
        except OffsetRLError:
            self._drop_reader()
            self._take_listed(None)  # the broker may be cut off while the bucket is not
            raise
        return self._take_head()

    def _read(self, log: Log) -> None:
        """Read what is new on the topic; at first all of it, since an old record alone may look valid."""
        if self._reader is None:
            self._heads = Heads(self._run, self._policy)
            bounds = log.bounds(self._place.topic)[0]
            self._reader, self._caught_up_at = log.reader({self._place: bounds.start}), bounds.end
        while True:
            try:
                self._heads = fold_envelopes(self._heads, self._reader.poll(timeout_s=self._poll_s))
            except LogGap:
                continue
            if self._closing.is_set() or self._reader.position(self._place) >= self._caught_up_at:
                return

    def _take_head(self) -> str:
        head = self._heads.head
        if head is None or not self._newer(head.name):
            return ""
        try:
            self._fetch(load_manifest(self._store, self._run, self._policy, head.name, head.digest))
        except ObjectMissing as error:  # not mirrored yet, or removed since: what is here may do meanwhile
            if time.monotonic() - self._listed_at >= min(_LIST_EVERY_S, 10 * self._poll_s):
                self._take_listed(self._heads)
            return f"{head.name} was announced, but is not whole in this bucket: {error}"
        return ""

    def _take_listed(self, heads: Heads | None) -> None:
        """Fetch the newest version in the bucket; with `heads`, the newest that is not void."""
        self._listed_at = time.monotonic()
        names = listed(self._store, self._run, self._policy)
        name = next((name for name in names if heads is None or heads.covers(name)), None)
        if name is not None and self._newer(name):
            self._fetch(load_manifest(self._store, self._run, self._policy, name))

    def _newer(self, name: Version) -> bool:
        return self._latest is None or name > self._latest.version

    def _fetch(self, manifest: Manifest) -> None:
        folder = loadable(fetch(self._store, manifest, manifest.digest, self._root, self._max_bytes))
        with self._changed:
            self._latest = FetchedWeights(manifest.name, folder, manifest.digest)
            in_use = (*self._in_use, manifest.name)
            self._changed.notify_all()
        self._logger.info("weights are here", version=str(manifest.name), size_bytes=manifest.size_bytes)
        prune(self._root, keep=self._keep, in_use=in_use)

    def _trouble(self, text: str) -> None:
        if not self._troubled:
            self._logger.warning("weights cannot be followed; trying again", error=text)
        self._troubled, self._error = True, text

    def _well(self, waiting: str) -> None:
        if self._troubled:
            self._logger.info("weights are followed again")
        self._troubled, self._error = False, waiting

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
