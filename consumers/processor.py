"""The processor: closed groups become outcomes with advantages.

consumes   `trajectories`, its share of the partitions, from committed positions, by assignment of its own; `control`
           (heartbeats of its policy's processors, which alone decide about shares)
produces   `samples` (one outcome per group, chained), `dead-letters` (what could not be read)
waits for  nothing but the broker: what it decides about groups depends on no clock, no heartbeat and no trainer
after a crash  reads its outcome partitions back over one lifetime, then trajectories from the committed position,
           which never passes the first member of the oldest open group. Repeats that it writes have no effect (the
           chain), so any number of processors may run, freeze, die or come back at any time.
"""

from __future__ import annotations

import structlog

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from consumers.sharing import ROLE, Sharing
from infra.daemon import Daemon
from infra.heartbeat import Heart
from schemas.errors import BrokerError, DeadlineExceeded, LogGap, SendFailed
from schemas.records import State

_BACKOFF_S = (0.25, 10.0)
_POLL_S = 0.25
_SLOW_S = 120.0
"""So long may one turn take, a slow component included, before the others take this processor for lost."""


def run(daemon: Daemon) -> int:
    """Process until asked to stop; the exit code."""
    processor = make_processor(daemon)
    heart = Heart(daemon, ROLE, hold_s=_SLOW_S)
    processor.sharing = make_sharing(daemon, heart.session)
    try:
        while not daemon.stop.requested:
            heart.beat(metrics=processor.metrics())  # before the turn: the first one may be slow as well
            wait_s = processor.turn(_POLL_S)
            daemon.stop.wait(wait_s)
        heart.beat(State.DRAINING, processor.metrics())
        processor.drain()
        return 0
    finally:
        processor.close()
        heart.close()


def make_processor(daemon: Daemon, route: Route | None = None) -> Processor:
    """The processor of a daemon's policy, or of another route (a derived run). Raises SettingError."""
    table, settings = daemon.table.process, daemon.settings
    recipe = make_recipe(
        shaping=table.shaping,
        filters=table.filters,
        group_filters=table.group_filters,
        advantage=table.advantage,
        settings=table.settings,
        min_members=table.min_members,
        group_size=daemon.table.dispatch.group_size,
    )
    source = daemon.table.source
    route = route or Route(
        run=settings.run.name,
        policy=daemon.policy,
        source_run=source.run or settings.run.name,
        source_policy=source.policy or daemon.policy,
    )
    partitions = Partitions(
        daemon.log,
        route,
        recipe,
        patience_s=settings.kafka.patience_s,
        commit_every_s=table.commit_every_s,
        max_tokens=settings.kafka.max_tokens,
    )
    return Processor(partitions)


def make_sharing(daemon: Daemon, session: str) -> Sharing:
    """How a session of a daemon's policy learns its share."""
    table, settings = daemon.table, daemon.settings
    return Sharing(
        daemon.log,
        settings.run.name,
        daemon.policy,
        session,
        timeout_s=table.dispatch.heartbeat_timeout_s,
        patience_s=settings.kafka.patience_s,
    )


class Processor:
    """Turns that survive a broker that is away: after any error everything is thrown away and built again from the log."""

    def __init__(self, partitions: Partitions, sharing: Sharing | None = None) -> None:
        self.partitions = partitions
        self.sharing = sharing
        """Without it, every partition is this processor's."""
        self._failures = 0
        self._said = ""
        self._log = structlog.get_logger("offsetrl.process")

    def turn(self, poll_s: float) -> float:
        """One poll and everything that follows from it; how long to rest before the next turn, in seconds."""
        try:
            if self.sharing is not None:
                self.partitions.own(self.sharing.share(self.partitions.num_partitions))
            self.partitions.work(poll_s)
        except (BrokerError, SendFailed, DeadlineExceeded, LogGap) as error:
            self.close()
            self._failures += 1
            self._say(error)
            return min(_BACKOFF_S[0] * 2.0 ** min(self._failures - 1, 10), _BACKOFF_S[1])
        if self._failures:
            self._log.info("processing again", failures=self._failures)
        self._failures, self._said = 0, ""
        return 0.0 if self.partitions.positions else poll_s

    def drain(self) -> None:
        """Commit what is done. A failure is harmless: the next processor repeats without effect."""
        try:
            self.partitions.commit()
        except (BrokerError, DeadlineExceeded) as error:
            self._log.warning(
                "position not committed at the end; the next processor repeats a little", error=str(error)
            )

    def metrics(self) -> dict[str, float]:
        """Counts since the start of this process, and the lag in records."""
        found = {**self.partitions.metrics(), "restarts": float(self._failures)}
        if self.sharing is not None:
            found["processors"] = float(self.sharing.num_alive)
            found["partitions"] = float(len(self.partitions.positions))
        return found

    def close(self) -> None:
        """Let go of readers and writer."""
        self.partitions.discard()
        if self.sharing is not None:
            self.sharing.close()

    def _say(self, error: Exception) -> None:
        """Say once what is wrong, not at every attempt."""
        kind = type(error).__name__
        if kind != self._said:
            self._log.warning("partitions are assigned again after an error", kind=kind, error=str(error))
        self._said = kind
