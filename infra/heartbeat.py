"""Says on `<run>.control` that this daemon is alive, from a thread of its own: a broker that is away never holds the daemon up.

Only what the daemon's own loop reports is sent, so a loop that hangs does not look alive. Of several reports between
two sends the newest counts. A daemon whose turns may be slow by right asks for its last report to be sent again for
`hold_s`; a loop that hangs longer than that does not look alive either.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import structlog

from infra.daemon import Daemon
from infra.log import Writer
from schemas.codec import encode
from schemas.errors import OffsetRLError
from schemas.names import control_topic
from schemas.records import Heartbeat, State

_SEND_TIMEOUT_S = 5.0
_BACKOFF_S = (0.25, 8.0)


class Heart:
    """The heartbeats of one session; close it to say that the daemon has left."""

    def __init__(self, daemon: Daemon, role: str, hold_s: float = 0.0) -> None:
        self.session = secrets.token_hex(4)
        self._daemon = daemon
        self._role = role
        self._every_s = daemon.table.rollout.heartbeat_s
        self._topic = control_topic(daemon.settings.run.name)
        self._key = f"{role}/{daemon.policy}/{daemon.name}".encode()
        self._last = (float("-inf"), State.UNKNOWN)
        self._hold_s = hold_s
        self._reported_s = float("-inf")
        self._waiting: Heartbeat | None = None
        self._closed = False
        self._wake = threading.Condition()
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, state: State = State.SERVING, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        """Report; `fields` are those of `Heartbeat` (inbox, capacity, running, epoch, version, labels).

        Cheap enough for every turn of a loop: it returns at once unless `heartbeat_s` is over or the state changed.
        """
        if self._bug is not None:
            raise self._bug
        now = time.monotonic()
        if state == self._last[1] and now - self._last[0] < self._every_s:
            return
        self._last = (now, state)
        record = Heartbeat(
            run=self._daemon.settings.run.name,
            policy=self._daemon.policy,
            role=self._role,
            name=self._daemon.name,
            session=self.session,
            state=state,
            region=self._daemon.region,
            metrics=dict(metrics or {}),
            **fields,
        )
        with self._wake:
            self._waiting, self._reported_s = record, now
            self._wake.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Say that the daemon has left, and wait a little for that; never raises."""
        if self._bug is None:
            self.beat(State.LEFT)
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """The thread: one writer, thrown away after each failure."""
        writer: Writer | None = None
        failures = 0
        log = structlog.get_logger("offsetrl.heartbeat")
        try:
            record: Heartbeat | None = None
            while (record := self._next(record)) is not None:
                try:
                    writer = writer or self._daemon.log.writer()
                    writer.send(self._topic, 0, encode(record), key=self._key).result(_SEND_TIMEOUT_S)
                    if failures:
                        log.info("heartbeats reach the broker again", topic=self._topic, failures=failures)
                    failures = 0
                except OffsetRLError as error:
                    if writer is not None:
                        writer.close()
                    writer = None
                    if not failures:
                        log.warning("heartbeats do not reach the broker", topic=self._topic, error=str(error))
                    failures += 1
                    self._rest(min(_BACKOFF_S[0] * 2 ** min(failures, 8), _BACKOFF_S[1]))
        except BaseException as error:  # noqa: BLE001  # raised in the daemon's own thread by the next beat
            self._bug = error
        finally:
            if writer is not None:
                writer.close()

    def _next(self, sent: Heartbeat | None) -> Heartbeat | None:
        """The next report, or the one that was sent once more while it is held; None at the end."""
        with self._wake:
            while self._waiting is None and not self._closed:
                is_held = sent is not None and time.monotonic() - self._reported_s < self._hold_s
                came = self._wake.wait_for(
                    lambda: self._waiting is not None or self._closed, 1.25 * self._every_s if is_held else None
                )
                if not came:
                    return sent
            record, self._waiting = self._waiting, None
            return record

    def _rest(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closed, seconds)
