"""Publishing a policy's weights: blobs, manifest, announcement, by the holder of the claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from infra.daemon import Daemon
from infra.weights import announce
from infra.weights.fetch import load_manifest
from infra.weights.manifest import Manifest
from infra.weights.publish import Source, publish
from schemas.errors import StoreError
from schemas.records import Claim

_SEND_S = 30.0
_BACKOFF_S = (0.5, 10.0)
_LOG = structlog.get_logger("offsetrl.publish")


class Publisher:
    """The weights of one policy under one claim."""

    def __init__(self, daemon: Daemon, claim: Claim, heads: announce.Heads) -> None:
        self._daemon, self._claim = daemon, claim
        self.head = heads.head.name.version if heads.head else -1
        """The newest version announced; -1 for none."""
        self._parent: Manifest | None = None
        if heads.head:
            self._parent = load_manifest(daemon.store, claim.run, claim.policy, heads.head.name, heads.head.digest)
        self._announce = announce.announcer(daemon.log, timeout_s=_SEND_S)

    def publish(self, files: Mapping[str, Source], *, version: int, step: int, plan_offset: int) -> None:
        """Make a version visible, whole; it must be above `head`."""
        assert version > self.head, (version, self.head)
        published = publish(
            self._daemon.store,
            self._announce,
            run=self._claim.run,
            policy=self._claim.policy,
            epoch=self._claim.epoch,
            nonce=self._claim.nonce,
            version=version,
            step=step,
            files=files,
            parent=self._parent,
            plan_offset=plan_offset,
            created_by=self._daemon.name,
        )
        self._parent, self.head = published.manifest, version
        _LOG.info("published", version=version, uploaded_bytes=published.uploaded_bytes)

    def publish_patiently(
        self,
        files: Mapping[str, Source],
        *,
        version: int,
        step: int,
        plan_offset: int,
        meanwhile: Callable[[], None],
    ) -> None:
        """As `publish`, again and again while the store is away, with `meanwhile` between. Raises StoreError at a stop."""
        failures = 0
        while True:
            try:
                return self.publish(files, version=version, step=step, plan_offset=plan_offset)
            except StoreError as error:  # what is stored already is not sent again
                if not failures:
                    _LOG.warning("the store is away; publishing again", version=version, error=str(error))
                failures += 1
                if self._daemon.stop.wait(min(_BACKOFF_S[0] * 2.0 ** min(failures, 10), _BACKOFF_S[1])):
                    raise
                meanwhile()
