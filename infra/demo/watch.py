"""Reads the run's log as it grows, into `PolicyProgress`: the view needs nothing but the log."""

from __future__ import annotations

import time

from infra.demo.progress import PolicyProgress
from infra.log import Log
from infra.ownership import read_record, start_positions
from infra.settings import Settings
from schemas.errors import BrokerError, LogGap
from schemas.names import control_topic, topic

_ENDINGS = {"steps": "all steps trained", "tokens": "all tokens trained", "hours": "the time is over"}


class Watch:
    """A reader of steps, weights and control of all policies."""

    def __init__(self, log: Log, settings: Settings, started_s: float) -> None:
        self._started_s = started_s
        self.policies = {
            name: PolicyProgress(name, table.train.stop_at, table.train.max_staleness)
            for name, table in settings.policies.items()
        }
        self._kinds = {
            topic(settings.run.name, policy, kind): (policy, kind)
            for policy in settings.policies
            for kind in ("steps", "weights")
        }
        self._log = log
        self._reader = log.reader(start_positions(log, [*self._kinds, control_topic(settings.run.name)]))
        self.moved_at_s = time.monotonic()
        """When something last moved towards the end of the run."""

    def poll(self, timeout_s: float) -> None:
        """Fold what is new; a broker that is away for a while is no reason to stop watching."""
        before = self._mark()
        try:
            envelopes = self._reader.poll(timeout_s)
        except (BrokerError, LogGap):
            time.sleep(timeout_s)
            return
        now_s = time.monotonic() - self._started_s
        for envelope in envelopes:
            record = read_record(envelope)
            policy, kind = self._kinds.get(envelope.topic, ("", "control"))
            for progress in self.policies.values() if not policy else [self.policies[policy]]:
                progress.take(kind, envelope.offset, record, envelope.time_ms, now_s)
        if self._mark() != before:
            self.moved_at_s = time.monotonic()

    def close(self) -> None:
        """Let go of the connection."""
        self._reader.close()

    @property
    def done(self) -> bool:
        """Whether every policy's run has ended and all its steps are done."""
        return all(progress.done for progress in self.policies.values())

    @property
    def ending(self) -> str:
        """Why the policies' runs have ended, in words."""
        found = {progress.ledger.ended(progress.stop_at) for progress in self.policies.values()}
        return ", ".join(_ENDINGS[limit] for limit in _ENDINGS if limit in found)

    def _mark(self) -> tuple[tuple[int, int], ...]:
        return tuple((p.ledger.steps_done, len(p.published)) for p in self.policies.values())
