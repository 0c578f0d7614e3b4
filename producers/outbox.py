"""Finished records on their way to the log: kept until they are acknowledged, sent again by a fresh writer after a failure.

A record may so stand on the log twice; the reader's rules give it one effect. Nothing is forgotten unacknowledged.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import structlog

from infra.log import Log, Pending, Writer
from schemas.errors import BrokerError, DeadlineExceeded, RecordTooLarge, SendFailed

_RESULT_S = 1.0
_BACKOFF_S = (0.25, 5.0)
_WINDOW_BYTES = 8 * 1024 * 1024
_LOG = structlog.get_logger("offsetrl.outbox")


class _Item(NamedTuple):
    topic: str
    partition: int
    value: bytes
    key: bytes
    name: str
    """Of the record, for the line that says it was refused."""


class Outbox:
    """An ordered queue in front of a writer. Belongs to one thread; no call waits longer than it is told to.

    `window_bytes`: unacknowledged bytes handed to the writer at most, well below what it holds before it makes its
    caller wait.
    """

    def __init__(self, log: Log, *, window_bytes: int = _WINDOW_BYTES) -> None:
        self._log, self._window_bytes = log, window_bytes
        self._writer: Writer | None = None
        self._unsent: deque[_Item] = deque()
        self._sent: deque[tuple[_Item, Pending]] = deque()
        """Before all of `_unsent`, in their order."""
        self._sent_bytes = 0
        self._failures = 0
        self._again_at = 0.0
        self.acknowledged = 0
        self.refused = 0
        """Records larger than the log takes: their group is closed by the dispatcher in the end."""

    def __len__(self) -> int:
        """Records not acknowledged yet."""
        return len(self._sent) + len(self._unsent)

    def put(self, topic: str, partition: int, value: bytes, key: bytes, name: str = "") -> None:
        """Queue a record and send it when the broker is there."""
        self._unsent.append(_Item(topic, partition, value, key, name or key.decode()))
        self.settle()

    def settle(self) -> None:
        """Send what is unsent and forget what is acknowledged, without waiting."""
        if time.monotonic() < self._again_at:
            return
        try:
            self._forget_acknowledged()
            self._send_unsent()
            self._forget_acknowledged()
        except (BrokerError, SendFailed, DeadlineExceeded) as error:
            self._start_over(error)
            return
        if self._failures and not len(self):
            _LOG.info("the log takes records again", failures=self._failures)
            self._failures = 0

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged; False if the time is over before."""
        deadline = time.monotonic() + timeout_s
        while len(self) and time.monotonic() < deadline:
            self.settle()
            time.sleep(0.005)
        return not len(self)

    def close(self) -> None:
        """Let go of the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _forget_acknowledged(self) -> None:
        while self._sent and self._sent[0][1].done():
            self._sent[0][1].result(_RESULT_S)
            item, _ = self._sent.popleft()
            self._sent_bytes -= len(item.value)
            self.acknowledged += 1

    def _send_unsent(self) -> None:
        if self._unsent and self._writer is None:
            self._writer = self._log.writer()
        while self._unsent and self._writer is not None:
            item = self._unsent[0]
            if self._sent and self._sent_bytes + len(item.value) > self._window_bytes:
                return
            try:
                pending = self._writer.send(item.topic, item.partition, item.value, key=item.key)
            except RecordTooLarge as error:
                _LOG.error("refused: larger than the log takes", record=item.name, error=str(error))
                self._unsent.popleft()
                self.refused += 1
                continue
            self._sent.append((self._unsent.popleft(), pending))
            self._sent_bytes += len(item.value)

    def _start_over(self, error: Exception) -> None:
        """A writer is finished after its first failure: all that is not acknowledged is sent again by a fresh one."""
        self.close()
        self._unsent.extendleft(item for item, _ in reversed(self._sent))
        self._sent.clear()
        self._sent_bytes = 0
        if not self._failures:
            _LOG.warning("the log is disturbed; records are kept and sent again", error=str(error), kept=len(self))
        self._failures += 1
        self._again_at = time.monotonic() + min(_BACKOFF_S[0] * 2.0 ** min(self._failures, 10), _BACKOFF_S[1])
