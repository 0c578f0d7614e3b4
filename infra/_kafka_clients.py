"""Thin wrappers of the client's consumer and producer: errors sorted, records as ours, an end that is certain.

The client's classes are handed in by `infra.kafka_log`, the only file that imports it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra._background import in_background
from infra._kafka_diagnosis import said
from infra._kafka_reader import Batches, FeedAway, FeedOutOfRange, FeedUnreadable
from infra._log_checks import Headers
from infra._log_writer import Refused, Sent
from infra.log import Envelope, Place
from schemas.errors import BrokerError, LogTruncated
from schemas.shape import maker

_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What the client raises over bytes that it cannot take apart, beside its own errors."""


_make_envelope = maker(Envelope, ("topic", "partition", "offset", "time_ms", "key", "value", "headers"))


@dataclass(frozen=True, slots=True)
class Client:
    """What is used of the client here: its module of errors, and its name for a place."""

    errors: Any
    partition: Any


class ConsumerFeed:
    """A consumer of fixed partitions, with its errors sorted; an `infra._kafka_reader.Feed`."""

    def __init__(self, client: Client, consumer: Any, positions: Mapping[Place, int]) -> None:
        self._errors, self._consumer = client.errors, consumer
        self._partitions = {Place(*place): client.partition(*place) for place in positions}
        consumer.assign(list(self._partitions.values()))
        for place, offset in positions.items():
            self.seek(place, offset)

    def poll(self, timeout_s: float, max_records: int) -> Batches:
        """Next records by partition. Raises FeedOutOfRange, FeedUnreadable, FeedAway; BrokerError when forbidden."""
        try:
            found = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except self._errors.OffsetOutOfRangeError as out:
            partition, offset = next(iter(out.args[0].items()))
            raise FeedOutOfRange(Place(*partition), offset) from None
        except self._errors.LogTruncationError as cut:
            raise LogTruncated(f"the log lost records that were read before: {cut}") from None
        except (self._errors.RetriableError, self._errors.AuthorizationError, RuntimeError) as away:
            raise FeedAway(said(away)) from None
        except (self._errors.KafkaError, *_UNREADABLE) as broken:
            raise FeedUnreadable(said(broken)) from None
        batches = []
        for partition, records in found.items():
            place = Place(*partition)
            batches.append((place, [_envelope(place, record) for record in records]))
        return batches

    def seek(self, place: Place, offset: int) -> None:
        """Read on from `offset`."""
        self._consumer.seek(self._partitions[place], offset)

    def positions(self) -> dict[Place, int]:
        """Where the client will read on."""
        try:
            found = {place: self._consumer.position(tp, timeout_ms=1) for place, tp in self._partitions.items()}
        except self._errors.LogTruncationError as cut:
            raise LogTruncated(f"the log lost records that were read before: {cut}") from None
        except (self._errors.KafkaError, RuntimeError) as away:
            raise FeedAway(said(away)) from None
        return {place: offset for place, offset in found.items() if offset is not None}

    def ends(self, timeout_s: float) -> dict[Place, int]:
        """Offsets behind the last records. Raises FeedAway."""
        try:
            found = self._consumer.end_offsets(list(self._partitions.values()), timeout_ms=int(timeout_s * 1000))
        except (self._errors.KafkaError, RuntimeError, KeyError) as away:
            raise FeedAway(said(away)) from None
        return {Place(*partition): offset for partition, offset in found.items()}

    def seen_end(self, place: Place) -> int | None:
        """Offset behind the last record as the newest fetched answer said; None before the first."""
        seen: int | None = self._consumer.highwater(self._partitions[place])
        return seen

    def close(self) -> None:
        """Let go; the client's own close may wait for the broker, so it is not waited for."""
        in_background("close a Kafka consumer", lambda: self._consumer.close(autocommit=False, timeout_ms=1000))


class SoundProducer:
    """A producer whose end is certain; an `infra._log_writer.Producer`."""

    def __init__(self, client: Client, producer: Any, check_place: Callable[[str, int], None]) -> None:
        self._errors, self._producer, self._check_place = client.errors, producer, check_place
        self._known: set[tuple[str, int]] = set()

    def start(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None, headers: Headers, sent: Sent
    ) -> None:
        """Queue a record; `sent` learns the outcome from the producer's thread."""
        try:
            if (topic, partition) not in self._known:  # the client would wait for an unknown topic until its limit
                self._check_place(topic, partition)
                self._known.add((topic, partition))
            future = self._producer.send(topic, value, key, list(headers), partition)
        except (self._errors.KafkaError, BrokerError, AssertionError, TypeError, ValueError) as refused:
            raise Refused(said(refused)) from None
        future.add_callback(sent.succeeded)
        future.add_errback(lambda error: sent.failed(said(error)))

    def abandon(self) -> None:
        """Send nothing any more: records queued behind a failed one must not reach the log."""
        self._producer._sender.force_close()

    def close(self) -> None:
        """Let go. The client's close first waits for each queued batch, so everything is given up before."""
        self.abandon()
        in_background("close a Kafka producer", self._bury)

    def _bury(self) -> None:
        """Wait for the producer's thread to end, then close what is left: nothing is queued any more."""
        self._producer._sender.join()
        with suppress(self._errors.KafkaError):
            self._producer.close(timeout=1)


def _envelope(place: Place, record: Any) -> Envelope:
    """A record of the client's as ours."""
    headers = tuple((name, value or b"") for name, value in record.headers) if record.headers else ()
    return _make_envelope((*place, record.offset, record.timestamp, record.key, record.value, headers))
