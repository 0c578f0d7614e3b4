"""Reads the chunks of an unfinished attempt from `partials`, at the offsets that a request names."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from infra.log import Envelope, Log, Place, Reader
from producers.transcript import Transcript, join
from schemas.codec import decode
from schemas.errors import DeadlineExceeded, RecordError
from schemas.names import topic
from schemas.records import DeadReason, Partial, Request
from schemas.validate import check_partial

_AT_ONCE = 64


class TakeOver:
    """One reader for each partition that was ever asked for; used by one thread at a time."""

    def __init__(self, log: Log, *, run: str, policy: str, max_tokens: int, timeout_s: float) -> None:
        self._log, self._run, self._policy, self._max_tokens = log, run, policy, max_tokens
        self._timeout_s = timeout_s
        self._topic = topic(run, policy, "partials")
        self._readers: dict[Place, Reader] = {}
        self._lock = threading.Lock()

    def read(self, request: Request) -> Transcript:
        """The transcript to go on from. Raises RecordError, BrokerError, LogGap or DeadlineExceeded: begin anew then."""
        place = Place(self._topic, request.partition)
        with self._lock:
            # Taken out while it is used: whatever ends the reading, also being interrupted, the next one gets a fresh reader.
            reader = self._readers.pop(place, None) or self._log.reader({place: request.resume[0]})
            try:
                found = _read(reader, place, request.resume, time.monotonic() + self._timeout_s)
                self._readers[place] = reader
            finally:
                if place not in self._readers:
                    reader.close()
        return join(self._chunk(request, found[offset]) for offset in request.resume)

    def close(self) -> None:
        """Let go of the readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _chunk(self, request: Request, envelope: Envelope) -> Partial:
        record = decode(envelope.value)
        if not isinstance(record, Partial):
            raise RecordError(DeadReason.WRONG_KIND, f"{_at(envelope)}: a {type(record).__name__}, not a chunk")
        check_partial(
            record, run=self._run, policy=self._policy, partition=envelope.partition, max_tokens=self._max_tokens
        )
        if (record.group, record.index) != (request.group, request.index) or record.attempt >= request.attempt:
            raise RecordError(DeadReason.WRONG_PLACE, f"{_at(envelope)}: of {record.id}, asked for by {request.id}")
        return record


def _read(reader: Reader, place: Place, offsets: tuple[int, ...], deadline: float) -> Mapping[int, Envelope]:
    wanted, found = set(offsets), dict[int, Envelope]()
    for offset in offsets:
        if offset in found:
            continue
        reader.seek(place, offset)
        while offset not in found and reader.position(place) <= offset:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{place.topic}[{place.partition}]: offset {offset} did not come in time")
            found.update({one.offset: one for one in reader.poll(0.1, _AT_ONCE) if one.offset in wanted})
        if offset not in found:
            raise RecordError(DeadReason.EMPTY, f"{place.topic}[{place.partition}]: nothing stands at offset {offset}")
    return found


def _at(envelope: Envelope) -> str:
    return f"{envelope.topic}[{envelope.partition}] at offset {envelope.offset}"
