"""The writer of every log: a byte budget, acknowledgements that nobody can overlook, and an end after any failure.

Knows no client: it gets a `Producer`, a thin wrapper of one. What it answers about Kafka's client:

- its memory has no bound and its send never blocks: bytes are counted here, and `send` waits for room;
- a flush succeeds although records failed: every send's outcome is kept, and `flush` looks at all of them;
- after one refused record it refuses all later ones, with the old error: one failure finishes the writer, and what
  was sent after the failed record is given up at once, so that no later record reaches the log behind a lost one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from infra._log_checks import Headers, check_record
from infra.log import Ack, Pending
from schemas.errors import DeadlineExceeded, SendFailed

_RECORD_OVERHEAD_BYTES = 256  # what a queued record costs beside its own bytes, roughly


class Refused(Exception):
    """The producer did not take a record; the text says why."""


class Producer(Protocol):
    """What the writer needs of a client: start a send, give everything up, close."""

    def start(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        sent: Sent,
    ) -> None:
        """Queue a record; later call `sent.succeeded(metadata)` or `sent.failed(error)`. Raises Refused."""
        ...

    def abandon(self) -> None:
        """Send nothing any more; takes no lock, may be called from the producer's own thread."""
        ...

    def close(self) -> None:
        """Let go; never raises, never waits long."""
        ...


class Sent:
    """A send on its way; its outcome is set once, by the producer's thread."""

    __slots__ = ("_ack", "_cost", "_error", "_writer", "partition", "topic")

    def __init__(self, writer: LogWriter, topic: str, partition: int, cost: int) -> None:
        self._writer, self.topic, self.partition, self._cost = writer, topic, partition, cost
        self._ack: Ack | None = None
        self._error: str | None = None

    def done(self) -> bool:
        """Whether the broker has answered, well or badly."""
        return self._ack is not None or self._error is not None

    def result(self, timeout_s: float) -> Ack:
        """Wait for the acknowledgement. Raises SendFailed, or DeadlineExceeded naming the record's place."""
        if self._ack is None and self._error is None and not self._writer.wait_for(self.done, timeout_s):
            raise DeadlineExceeded(
                f"{self.topic}[{self.partition}]: no acknowledgement of a record within {timeout_s:g} s; "
                "it may or may not be on the log"
            )
        if self._ack is None:
            raise SendFailed(f"{self._error}")
        return self._ack

    def succeeded(self, metadata: Any) -> None:
        """Note the acknowledgement (called by the producer)."""
        if metadata.offset < 0:  # acknowledged as a repeat of something older, whose address the broker forgot
            self.failed("acknowledged without an offset")
            return
        ack, writer = Ack(self.partition, metadata.offset), self._writer
        with writer.lock:
            self._ack = ack
            writer.settle(self, self._cost)

    def failed(self, error: object) -> None:
        """Note the failure, and finish the writer (called by the producer)."""
        with self._writer.lock:
            self._error = self._writer.mask(
                f"{self.topic}[{self.partition}]: a record was not acknowledged ({error}); its writer is finished: "
                "close it, go back to the last acknowledged record and take a fresh writer"
            )
            self._writer.finish(self._error)
            self._writer.settle(self, self._cost)


class LogWriter:
    """Sends records; one thread uses it. After any failure it is finished."""

    def __init__(
        self,
        producer: Producer,
        *,
        max_record_bytes: int,
        buffer_bytes: int,
        patience_s: float,
        mask: Callable[[str], str] = str,
    ) -> None:
        self._producer = producer
        self._max_record_bytes, self._buffer_bytes = max_record_bytes, buffer_bytes
        self._patience_s, self.mask = patience_s, mask
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._awaited: list[Callable[[], bool]] = []  # what threads wait for: nobody is woken in vain, for each record
        self._open: dict[int, Sent] = {}  # by identity, in the order of sending
        self._held_bytes = 0
        self._finished: str | None = None
        self.closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._held_bytes

    def send(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None = None, headers: Headers = ()
    ) -> Pending:
        """Queue a record. Raises RecordTooLarge before anything is sent (the writer stays usable), SendFailed when
        the writer is finished or the producer refuses, DeadlineExceeded when the byte budget stays full."""
        cost = check_record(topic, partition, value, key, headers, self._max_record_bytes) + _RECORD_OVERHEAD_BYTES
        sent = Sent(self, topic, partition, cost)
        self._reserve(sent, cost)
        try:
            self._producer.start(topic, partition, value, key, headers, sent)
        except Refused as refused:
            sent.failed(refused)
            raise SendFailed(self._finished) from None
        return sent

    def flush(self, timeout_s: float) -> None:
        """Wait until every record sent so far is acknowledged. Raises SendFailed or DeadlineExceeded."""
        with self.lock:
            settled = self.wait_for(lambda: self._finished is not None or not self._open, timeout_s)
            if self._finished is not None:
                raise SendFailed(self._finished)
            if not settled:
                oldest = next(iter(self._open.values()))
                raise DeadlineExceeded(
                    f"{oldest.topic}[{oldest.partition}]: {len(self._open)} records ({self._held_bytes} bytes) were "
                    f"not acknowledged within {timeout_s:g} s; they may or may not be on the log"
                )

    def close(self) -> None:
        """Let go; never raises, never waits long. What was not flushed may or may not be on the log."""
        with self.lock:
            if self._finished is None:
                self._finished = "the writer is closed"
            was_closed, self.closed = self.closed, True
        if not was_closed:
            self._producer.close()

    def settle(self, sent: Sent, cost: int) -> None:
        """Take a record off the books; the caller holds `lock`."""
        if self._open.pop(id(sent), None) is not None:
            self._held_bytes -= cost
        for is_met in self._awaited:
            if is_met():
                self._changed.notify_all()
                break

    def wait_for(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a settled record has made this true; False if the time is over before."""
        with self.lock:
            self._awaited.append(is_met)
            try:
                return self._changed.wait_for(is_met, timeout_s)
            finally:
                self._awaited.remove(is_met)

    def finish(self, error: str) -> None:
        """End the writer for a failure; the first one is kept. The caller holds `lock`."""
        if self._finished is None:
            self._finished = error
            self._producer.abandon()

    def _reserve(self, sent: Sent, cost: int) -> None:
        """Wait for room in the byte budget; a record larger than all of it passes when nothing else is held."""
        with self.lock:
            if self._finished is None and self._held_bytes + cost <= self._buffer_bytes:  # nearly always
                self._open[id(sent)] = sent
                self._held_bytes += cost
                return
            has_room = self.wait_for(lambda: self._has_room(cost), self._patience_s)
            if self._finished is not None:
                raise SendFailed(f"{sent.topic}[{sent.partition}]: nothing can be sent any more: {self._finished}")
            if not has_room:
                raise DeadlineExceeded(
                    f"{sent.topic}[{sent.partition}]: no room for {cost} bytes within {self._patience_s:g} s: "
                    f"{self._held_bytes} of kafka.buffer_bytes = {self._buffer_bytes} wait for acknowledgement; "
                    "the broker is away or slow"
                )
            self._open[id(sent)] = sent
            self._held_bytes += cost

    def _has_room(self, cost: int) -> bool:
        """Whether a record of this cost may be sent, or never will be."""
        return self._finished is not None or not self._open or self._held_bytes + cost <= self._buffer_bytes
