"""A worker session's inbox: which partition of `requests` it is, and the requests there that count and are its own.

A broker that is away holds nobody up: reading is tried again now and then, and what runs goes on meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter

import structlog

from infra.daemon import Daemon
from infra.log import Place, Reader
from infra.ownership import read_all, read_record
from schemas.errors import BrokerError, DeadlineExceeded, LogGap
from schemas.names import control_topic, topic
from schemas.records import Claim, Heartbeat, Record, Request, State
from schemas.rules.claims import Claims

_IDLE_S = 0.02
_POLL_EVERY_S = 0.01
_BACKOFF_S = (0.25, 5.0)
_LOG = structlog.get_logger("offsetrl.rollout")


class Inbox:
    """Belongs to one session and one thread. `claims`: who dispatches, as far as the log said before."""

    def __init__(self, daemon: Daemon, session: str, number: int, reader: Reader, claims: Claims) -> None:
        self._stop, self._session = daemon.stop, session
        self.number = number
        self._reader, self._claims = reader, claims
        self._failures, self._again_at = 0, 0.0
        self.num_void = 0
        """Requests of dispatchers that were superseded when they wrote them."""

    def take(self, *, idle: bool) -> list[tuple[Request, int]]:
        """Requests for this session with their append times; waits a moment for them only while it is idle."""
        now = time.monotonic()
        if now < self._again_at and (self._failures or not idle):
            if idle:
                self._stop.wait(_IDLE_S)
            return []
        try:
            envelopes = self._reader.poll(_IDLE_S if idle else 0.0)
        except (BrokerError, LogGap) as error:  # the reader keeps its position, or stands behind the gap
            if not self._failures:
                _LOG.warning("requests cannot be read; trying again", error=str(error))
            self._failures += 1
            self._again_at = now + _rest_s(self._failures)
            return []
        if self._failures:
            _LOG.info("requests are read again", failures=self._failures)
        self._failures, self._again_at = 0, now + _POLL_EVERY_S
        return [
            (record, envelope.time_ms)
            for envelope in envelopes
            if self._is_mine(record := read_record(envelope)) and isinstance(record, Request)
        ]

    def close(self) -> None:
        """Let go of the reader."""
        self._reader.close()

    def _is_mine(self, record: Record | None) -> bool:
        if isinstance(record, Claim) and record.role == "dispatch":
            self._claims.claim(record.epoch, record.nonce)
        if not isinstance(record, Request):
            return False
        self._claims.claim(record.epoch, record.nonce)  # its claim stands before it, perhaps before this session began
        if not self._claims.owns(record.epoch, record.nonce):
            self.num_void += 1
            return False
        return record.session == self._session


def find_inbox(daemon: Daemon, session: str) -> Inbox | None:
    """The inbox that is used least, read from its present end; waits for a broker that is away, None when asked to stop."""
    failures = 0
    while not daemon.stop.requested:
        try:
            return _look_around(daemon, session)
        except (BrokerError, DeadlineExceeded, LogGap) as error:
            if not failures:
                _LOG.warning("no inbox can be had yet; trying again", error=str(error))
            failures += 1
            daemon.stop.wait(_rest_s(failures))
    return None


def _look_around(daemon: Daemon, session: str) -> Inbox:
    """Who dispatches, and who reads which inbox, from what stands on control."""
    settings, policy = daemon.settings, daemon.policy
    place = Place(control_topic(settings.run.name), 0)
    claims = Claims()
    inboxes: dict[str, int] = {}
    for envelope in read_all(daemon.log, place, daemon.log.bounds(place.topic)[0]):
        record = read_record(envelope)
        if isinstance(record, Claim) and (record.role, record.policy) == ("dispatch", policy):
            claims.claim(record.epoch, record.nonce)
        if isinstance(record, Heartbeat) and (record.role, record.policy) == ("rollout", policy):
            gone = record.state is State.LEFT or record.name == daemon.name
            inboxes[record.name] = -1 if gone else record.inbox
    used = Counter(inbox for inbox in inboxes.values() if inbox >= 0)
    number = min(range(settings.run.inboxes), key=lambda inbox: (used[inbox], inbox))
    mine = Place(topic(settings.run.name, policy, "requests"), number)
    reader = daemon.log.reader({mine: daemon.log.bounds(mine.topic)[number].end})
    return Inbox(daemon, session, number, reader, claims)


def _rest_s(failures: int) -> float:
    return float(min(_BACKOFF_S[0] * 2.0 ** min(failures - 1, 10), _BACKOFF_S[1]))
