"""Finished records on their way to the log: kept until they are acknowledged, sent again by a fresh writer after a failure.

A record may so stand on the log twice; the reader's rules give it one effect. Nothing is forgotten unacknowledged.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import structlog

from infra.log import Log, Pending, Writer
from schemas.errors import BrokerError, DeadlineExceeded, RecordTooLarge, SendFailed

_RESULT_S = 1.0
_BACKOFF_S = (0.25, 5.0)
_LOG = structlog.get_logger("offsetrl.outbox")


@dataclass(slots=True)
class _Item:
    topic: str
    partition: int
    value: bytes
    key: bytes
    pending: Pending | None = None


class Outbox:
    """An ordered queue in front of a writer. Belongs to one thread; no call waits longer than it is told to."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._writer: Writer | None = None
        self._items: deque[_Item] = deque()
        self._failures = 0
        self._again_at = 0.0
        self.acknowledged = 0
        self.refused = 0
        """Records larger than the log takes: their group is closed by the dispatcher in the end."""

    def __len__(self) -> int:
        """Records not acknowledged yet."""
        return len(self._items)

    def put(self, topic: str, partition: int, value: bytes, key: bytes) -> None:
        """Queue a record and send it when the broker is there."""
        self._items.append(_Item(topic, partition, value, key))
        self.settle()

    def settle(self) -> None:
        """Send what is unsent and forget what is acknowledged, without waiting."""
        if time.monotonic() < self._again_at:
            return
        try:
            self._send_unsent()
            while self._items and (pending := self._items[0].pending) is not None and pending.done():
                pending.result(_RESULT_S)
                self._items.popleft()
                self.acknowledged += 1
        except (BrokerError, SendFailed, DeadlineExceeded) as error:
            self._start_over(error)
            return
        if self._failures and not self._items:
            _LOG.info("the log takes records again", failures=self._failures)
            self._failures = 0

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged; False if the time is over before."""
        deadline = time.monotonic() + timeout_s
        while self._items and time.monotonic() < deadline:
            self.settle()
            time.sleep(0.005)
        return not self._items

    def close(self) -> None:
        """Let go of the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _send_unsent(self) -> None:
        if self._writer is None:
            self._writer = self._log.writer()
        for item in list(self._items) if self._failures else _tail(self._items):
            if item.pending is not None:
                continue
            try:
                item.pending = self._writer.send(item.topic, item.partition, item.value, key=item.key)
            except RecordTooLarge as error:
                _LOG.error("refused: larger than the log takes", key=item.key.decode(), error=str(error))
                self._items.remove(item)
                self.refused += 1

    def _start_over(self, error: Exception) -> None:
        """A writer is finished after its first failure: all that is not acknowledged is sent again by a fresh one."""
        self.close()
        for item in self._items:
            item.pending = None
        if not self._failures:
            _LOG.warning(
                "the log is disturbed; records are kept and sent again", error=str(error), kept=len(self._items)
            )
        self._failures += 1
        self._again_at = time.monotonic() + min(_BACKOFF_S[0] * 2**self._failures, _BACKOFF_S[1])


def _tail(items: deque[_Item]) -> list[_Item]:
    """The unsent records, which are always the last ones while nothing has failed."""
    unsent: list[_Item] = []
    for item in reversed(items):
        if item.pending is not None:
            break
        unsent.append(item)
    return unsent[::-1]
