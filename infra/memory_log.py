"""The log in memory: the same promises and refusals as the Kafka log, for tests and for runs within one process.

Beside the log itself it has knobs for what a cluster does at the worst moment: `delete_before` (retention),
`compact`, `corrupt`, `fail_sends`, `stall`, and `away`. Append times come from a clock that can be given.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from infra._log_checks import Headers, check_existing, check_note, check_time
from infra._log_writer import LogWriter, Sent
from infra._memory_reader import MemoryReader
from infra.log import CORRUPT_HEADER, Ack, Bounds, Committed, Envelope, Place, TopicSpec
from schemas.errors import BrokerError, SettingError

_BATCH_OVERHEAD_BYTES = 70
_BROKER_DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "retention.ms": "604800000",
}


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Partition:
    """Records in offset order (compaction leaves holes), and the bounds around them."""

    records: list[Envelope] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def index(self, offset: int) -> int:
        """Index of the first record at or behind an offset."""
        return bisect_left(self.records, offset, key=lambda record: record.offset)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A record on its way to the log."""

    producer: _MemoryProducer
    sent: Sent
    value: bytes | None
    key: bytes | None
    headers: Headers


class MemoryLog:
    """A cluster in memory. Any thread may call it; a reader and a writer belong to one thread each."""

    def __init__(
        self,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
        max_record_bytes: int = 16 * 1024 * 1024,
        buffer_bytes: int = 64 * 1024 * 1024,
        patience_s: float = 30.0,
    ) -> None:
        self.clock_ms = clock_ms
        self._max_record_bytes, self._buffer_bytes, self._patience_s = max_record_bytes, buffer_bytes, patience_s
        self.changed = threading.Condition()
        self.away = False
        """While True nothing is answered: reads and questions raise BrokerError, sends fail."""
        self._topics: dict[str, list[_Partition]] = {}
        self._configs: dict[str, dict[str, str]] = {}
        self._committed: dict[str, dict[Place, Committed]] = {}
        self._failing: list[bool] = []
        self._stalled: list[_Arrival] | None = None
        self._closed = False

    # Readers and writers

    def reader(self, positions: Mapping[Place, int]) -> MemoryReader:
        """A reader of exactly these partitions, each from the given offset."""
        return MemoryReader(self, positions)

    def writer(self) -> LogWriter:
        """A fresh writer."""
        self._check_answers()
        return LogWriter(
            _MemoryProducer(self),
            max_record_bytes=self._max_record_bytes,
            buffer_bytes=self._buffer_bytes,
            patience_s=self._patience_s,
        )

    # Questions about topics

    def bounds(self, topic: str) -> dict[int, Bounds]:
        """Start and end of each partition. Raises BrokerError naming a topic that does not exist."""
        with self.changed:
            return {number: Bounds(part.start, part.end) for number, part in enumerate(self._partitions(topic))}

    def offset_at(self, place: Place, time_ms: int) -> int | None:
        """Offset of the first record appended at or after `time_ms`; None when there is none."""
        check_time(time_ms)
        with self.changed:
            records = self.partition(place).records
            return next((record.offset for record in records if record.time_ms >= time_ms), None)

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        """Store positions under a name."""
        for committed in positions.values():
            check_note(group, committed.note)
        with self.changed:
            for place in positions:
                self.partition(place)
            self._committed.setdefault(group, {}).update({Place(*place): at for place, at in positions.items()})

    def committed(self, group: str, places: Iterable[Place]) -> dict[Place, Committed]:
        """Stored positions; partitions without one are left out."""
        self._check_answers()
        with self.changed:
            known = self._committed.get(group, {})
            return {Place(*place): known[place] for place in places if place in known}

    def topics(self) -> set[str]:
        """Names of all topics."""
        self._check_answers()
        with self.changed:
            return set(self._topics)

    def create(self, specs: Iterable[TopicSpec]) -> None:
        """Make the topics that do not exist yet; SettingError when one exists that does not do."""
        self._check_answers()
        with self.changed:
            for spec in specs:
                if spec.partitions < 1:
                    raise SettingError(f"topic {spec.name} cannot be made with {spec.partitions} partitions")
                if spec.name not in self._topics:
                    self._topics[spec.name] = [_Partition() for _ in range(spec.partitions)]
                    self._configs[spec.name] = {**_BROKER_DEFAULTS, **spec.config}
                check_existing(spec, len(self._topics[spec.name]), self._configs[spec.name])

    def describe(self, topic: str) -> Mapping[str, str]:
        """The topic's effective configuration."""
        with self.changed:
            self._partitions(topic)
            return dict(self._configs[topic])

    def check(self) -> str:
        """What answers here. Raises BrokerError while away."""
        self._check_answers()
        return "a log in memory"

    def close(self) -> None:
        """Let go; what is written stays readable by nobody."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    # Knobs for tests

    def delete_before(self, place: Place, offset: int) -> None:
        """Remove the records below an offset, as retention does."""
        with self.changed:
            part = self.partition(place)
            part.start = max(part.start, min(offset, part.end))
            del part.records[: part.index(part.start)]

    def compact(self, topic: str) -> None:
        """Keep the newest record of each key, as the broker's cleaner does; offsets stay."""
        with self.changed:
            for part in self._partitions(topic):
                newest = {record.key: record.offset for record in part.records}
                part.records = [record for record in part.records if newest[record.key] == record.offset]

    def corrupt(self, place: Place, offset: int, found: bytes = b"") -> None:
        """Break the checksum of a record; `found` is what can still be read of its value."""
        with self.changed:
            part = self.partition(place)
            index = part.index(offset)
            record = part.records[index]
            mark = (CORRUPT_HEADER, found)
            part.records[index] = replace(record, value=None, headers=(mark, *record.headers))

    def fail_sends(self, count: int = 1, *, present: bool = False) -> None:
        """Let the next sends fail. `present`: their records stand on the log all the same, as after a lost answer."""
        with self.changed:
            self._failing += [present] * count

    def stall(self) -> None:
        """Leave sends without an answer until `resume`."""
        with self.changed:
            self._stalled = self._stalled or []

    def resume(self) -> None:
        """Answer the sends that were stalled, in their order."""
        with self.changed:
            waiting, self._stalled = self._stalled or [], None
            for arrival in waiting:
                self._answer(arrival)

    # For reader and writer, which hold `changed`

    def partition(self, place: Place) -> _Partition:
        """A partition. Raises BrokerError when there is none."""
        partitions = self._partitions(place[0])
        if not 0 <= place[1] < len(partitions):
            raise BrokerError(
                f"{place[0]}[{place[1]}] does not exist: {place[0]} has {len(partitions)} partitions, from 0"
            )
        return partitions[place[1]]

    def accept(self, arrival: _Arrival) -> None:
        """Append a record and answer its send, or fail it, or leave it for later."""
        with self.changed:
            if self._stalled is not None:
                self._stalled.append(arrival)
            else:
                self._answer(arrival)

    def _answer(self, arrival: _Arrival) -> None:
        sent = arrival.sent
        present = self._failing.pop(0) if self._failing else None
        problem = self._problem(arrival)
        if problem is not None or present is False:
            sent.failed(problem or "failed on request")
            return
        part = self.partition(Place(sent.topic, sent.partition))
        ack = Ack(sent.partition, part.end)
        part.records.append(
            Envelope(sent.topic, *ack, self.clock_ms(), arrival.key, arrival.value, tuple(arrival.headers))
        )
        part.end += 1
        self.changed.notify_all()
        if present:
            sent.failed("failed on request")
        else:
            sent.succeeded(ack)

    def _problem(self, arrival: _Arrival) -> str | None:
        """Why a broker would refuse this record."""
        if arrival.producer.abandoned:
            return "given up"
        try:
            self.partition(Place(arrival.sent.topic, arrival.sent.partition))
        except BrokerError as error:
            return str(error)
        config = self._configs[arrival.sent.topic]
        if arrival.key is None and "compact" in config["cleanup.policy"]:
            return "a compacted topic takes no record without a key"
        limit = int(config["max.message.bytes"])
        size = len(arrival.value or b"") + _BATCH_OVERHEAD_BYTES
        return f"{size} bytes are more than the topic's max.message.bytes = {limit}" if size > limit else None

    def _partitions(self, topic: str) -> list[_Partition]:
        self._check_answers()
        if topic not in self._topics:
            raise BrokerError(f"topic {topic} does not exist: make the run's topics first (`offsetrl up`)")
        return self._topics[topic]

    def _check_answers(self) -> None:
        if self.away or self._closed:
            raise BrokerError("the log in memory is " + ("closed" if self._closed else "away"))


class _MemoryProducer:
    """Hands records to the log, unless it was told to stop; see `infra._log_writer.Producer`."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.abandoned = False

    def start(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None, headers: Headers, sent: Sent
    ) -> None:
        """Append a record, or fail it, or leave it for later."""
        self._log.accept(_Arrival(self, sent, value, key, headers))

    def abandon(self) -> None:
        """Let nothing that is stalled reach the log any more."""
        self.abandoned = True

    def close(self) -> None:
        """Let go."""
        self.abandon()
