"""What a log is: partitions of records with offsets, one reader with positions of its own, one writer whose every send is awaited.

`infra.kafka_log` and `infra.memory_log` hold the two implementations; both pass `tests/contract/test_log.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

CORRUPT_HEADER = "offsetrl-corrupt"
"""Header of a record whose batch fails its checksum; it holds the value's bytes as found (empty: not even those)."""


class Place(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """A record as it stands on the log: raw bytes and its address. The client never decodes."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    """Append time, given by the broker."""
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def place(self) -> Place:
        """The partition that the record stands in."""
        return Place(self.topic, self.partition)


class Bounds(NamedTuple):
    """First offset still there, and the offset that the next record will get."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A stored position with a note of the owner's (at most 4,000 characters)."""

    offset: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to be made: name, partitions and its configuration."""

    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


class Ack(NamedTuple):
    """Where an acknowledged record stands."""

    partition: int
    offset: int


class Pending(Protocol):
    """A send on its way."""

    def done(self) -> bool:
        """Whether the broker has answered, well or badly."""
        ...

    def result(self, timeout_s: float) -> Ack:
        """Wait for the acknowledgement. Raises SendFailed, or DeadlineExceeded naming the record's place."""
        ...


class Reader(Protocol):
    """Reads the partitions it was given, from the positions it was given. Belongs to one thread."""

    def poll(self, timeout_s: float, max_records: int = 1000) -> list[Envelope]:
        """Next records, of all partitions, in offset order within each; empty after the timeout.

        Raises LogGap when retention removed the next ones (the position then stands behind the gap, so a further
        poll goes on), BrokerError when the broker stays away longer than the log's patience.
        Records of a batch whose checksum is broken come with `value=None` and the header `CORRUPT_HEADER`, which
        holds the bytes as found: they may look fine and be wrong, so they are kept from whoever does not ask.
        """
        ...

    def seek(self, place: Place, offset: int) -> None:
        """Read on from `offset`."""
        ...

    def position(self, place: Place) -> int:
        """Offset of the next record that poll will return."""
        ...

    def end(self, place: Place) -> int:
        """Offset behind the last record, as the log's newest answer to a poll said; asks nothing. Never before `position`."""
        ...

    def close(self) -> None:
        """Let go of the connection; never raises, never waits long."""
        ...


class Writer(Protocol):
    """Sends records. After any failure it is finished: close it and ask the log for another."""

    def send(
        self,
        topic: str,
        partition: int,
        value: bytes,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
    ) -> Pending:
        """Queue a record. Raises RecordTooLarge before anything is sent, SendFailed when the writer is already
        finished, DeadlineExceeded when the byte budget stays full."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Wait until every record sent so far is acknowledged. Raises as `Pending.result` does."""
        ...

    def close(self) -> None:
        """Let go; never raises, never waits long. What was not flushed may or may not be on the log."""
        ...


class Log(Protocol):
    """A cluster: makes readers and writers, answers questions about topics. Every call has a time limit."""

    def reader(self, positions: Mapping[Place, int]) -> Reader:
        """A reader of exactly these partitions, each from the given offset."""
        ...

    def writer(self) -> Writer:
        """A fresh writer (acks from all replicas, idempotent)."""
        ...

    def bounds(self, topic: str) -> dict[int, Bounds]:
        """Start and end of each partition. Raises BrokerError naming a topic that does not exist."""
        ...

    def offset_at(self, place: Place, time_ms: int) -> int | None:
        """Offset of the first record appended at or after `time_ms`; None when there is none."""
        ...

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        """Store positions under a name; readers never move by themselves."""
        ...

    def committed(self, group: str, places: Iterable[Place]) -> dict[Place, Committed]:
        """Stored positions; partitions without one are left out."""
        ...

    def topics(self) -> set[str]:
        """Names of all topics."""
        ...

    def create(self, specs: Iterable[TopicSpec]) -> None:
        """Make the topics that do not exist yet; refuses (SettingError) when one exists with other partitions."""
        ...

    def describe(self, topic: str) -> Mapping[str, str]:
        """The topic's effective configuration."""
        ...

    def close(self) -> None:
        """Let go of everything that this log opened."""
        ...
