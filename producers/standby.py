"""A second dispatcher that waits: it follows the heartbeats of the one that dispatches, and goes on when they end.

The claim alone decides who dispatches. Waiting only keeps two that are both well from superseding each other in turn.
"""

from __future__ import annotations

import time

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.log import Envelope, Place, Reader
from infra.ownership import catch_up, read_record
from schemas.errors import BrokerError, DeadlineExceeded, LogGap
from schemas.names import control_topic
from schemas.records import Claim, Heartbeat, State

_CATCH_UP_S = 120.0
_REST_S = 0.5
_LOG = structlog.get_logger("offsetrl.dispatch")


class Owners:
    """The dispatchers of a policy that have claimed and live, as a fold over `control`. Pure; `now_s`: any steady clock.

    A claim is a sign of life by itself, since its owner's first heartbeat comes after it.
    """

    def __init__(self, policy: str, timeout_s: float) -> None:
        self._policy, self._timeout_s = policy, timeout_s
        self._sessions: dict[str, tuple[str, int, float]] = {}
        self._claim = (0, 0.0)
        self._gone = 0

    def saw(self, record: object, now_s: float) -> None:
        """A record of `control`."""
        if not isinstance(record, Claim | Heartbeat) or (record.role, record.policy) != ("dispatch", self._policy):
            return
        if isinstance(record, Claim):
            if record.epoch > self._claim[0]:
                self._claim = (record.epoch, now_s)
        elif record.state is State.LEFT:
            _, epoch, _ = self._sessions.pop(record.session, ("", 0, 0.0))
            self._gone = max(self._gone, epoch)
        elif record.epoch or record.session in self._sessions:
            _, epoch, _ = self._sessions.get(record.session, ("", 0, 0.0))
            self._sessions[record.session] = (record.name, max(epoch, record.epoch), now_s)

    def heard_nothing(self, now_s: float) -> None:
        """The log was away until now, so nobody's silence means anything."""
        self._sessions = {session: (name, epoch, now_s) for session, (name, epoch, _) in self._sessions.items()}
        self._claim = (self._claim[0], now_s)

    def alive(self, now_s: float) -> str:
        """Name of the one that dispatches; "" when there is none.

        >>> from schemas.records import Heartbeat, State
        >>> owners = Owners("main", 8.0)
        >>> owners.saw(Heartbeat(run="demo", policy="main", role="dispatch", name="d1", session="a", state=State.SERVING, epoch=3), 0.0)
        >>> owners.alive(7.0), owners.alive(9.0)
        ('d1', '')
        """
        living = [(epoch, name) for name, epoch, seen_s in self._sessions.values() if now_s - seen_s <= self._timeout_s]
        if living:
            return max(living)[1]
        epoch, seen_s = self._claim
        is_new = epoch > max([self._gone, *(known for _, known, _ in self._sessions.values())])
        return f"epoch {epoch}" if is_new and now_s - seen_s <= self._timeout_s else ""


def wait_for_turn(daemon: Daemon, heart: Heart) -> None:
    """Return when no other dispatcher of this policy lives, or when told to stop."""
    place = Place(control_topic(daemon.settings.run.name), 0)
    owners = Owners(daemon.policy, daemon.table.dispatch.heartbeat_timeout_s)
    waits_for = ""
    reader: Reader | None = None

    def handle(envelope: Envelope) -> None:
        owners.saw(read_record(envelope), time.monotonic())

    try:
        while not daemon.stop.requested:
            try:
                if reader is None:
                    reader = daemon.log.reader({place: daemon.log.bounds(place.topic)[place.partition].start})
                    catch_up(daemon.log, reader, [place], handle, _CATCH_UP_S)
                    owners.heard_nothing(time.monotonic())
                for envelope in reader.poll(0.1):
                    handle(envelope)
            except (BrokerError, DeadlineExceeded, LogGap) as error:
                _LOG.warning("standby: control cannot be read; trying again", error=str(error))
                _let_go(reader)
                reader = None
                daemon.stop.wait(_REST_S)
                continue
            found = owners.alive(time.monotonic())
            if not found:
                break
            if found != waits_for:
                _LOG.info("standby: waiting while another dispatcher lives", other=found)
                waits_for = found
            heart.beat(State.STARTING, labels={"standby_for": found})
            daemon.stop.wait(0.1)
        if waits_for and not daemon.stop.requested:
            _LOG.warning("standby takes over: the other dispatcher left or fell silent", other=waits_for)
    finally:
        _let_go(reader)


def _let_go(reader: Reader | None) -> None:
    if reader is not None:
        reader.close()
