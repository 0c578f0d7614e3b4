"""The checks that every log makes alike before it talks to anybody: record sizes, notes, topics that exist already.

Plain data in, an error or nothing out; `infra.kafka_log` and `infra.memory_log` share them, so that a test against
the memory sees the same refusals as a run against a broker.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.log import Place, TopicSpec
from schemas.errors import LogTruncated, RecordTooLarge, SettingError

LARGEST_NOTE = 4000
"""Characters of a committed position's note; brokers refuse more than 4,096 bytes."""
LARGEST_LABEL_BYTES = 32 * 1024
"""Bytes of a record's key and headers together; topics allow 64 KiB beside the largest value."""

Headers = tuple[tuple[str, bytes], ...]


def label_bytes(key: bytes | None, headers: Headers) -> int:
    """Bytes of key and headers.

    >>> label_bytes(b"group", (("origin", b"t-0"),))
    14
    """
    size = len(key) if key is not None else 0
    for name, value in headers:
        size += len(name) + len(value)
    return size


def check_record(
    topic: str, partition: int, value: bytes | None, key: bytes | None, headers: Headers, max_bytes: int
) -> int:
    """Bytes of a record that fits. Raises RecordTooLarge, naming size and limit, for one that does not."""
    value_bytes = len(value) if value is not None else 0
    if value_bytes > max_bytes:
        raise RecordTooLarge(
            f"{topic}[{partition}]: a record of {value_bytes} bytes was refused before it was sent; the limit is "
            f"kafka.max_record_bytes = {max_bytes}: raise it (topics follow when they are made), or put the payload "
            "into the object store and send its key"
        )
    labels = label_bytes(key, headers) if key is not None or headers else 0
    if labels > LARGEST_LABEL_BYTES:
        raise RecordTooLarge(
            f"{topic}[{partition}]: a record with {labels} bytes of key and headers was refused before it was sent; "
            f"the limit is {LARGEST_LABEL_BYTES}: put what is long into the value"
        )
    return value_bytes + labels


def check_note(group: str, note: str) -> None:
    """Raise SettingError for a note that a broker would refuse."""
    if len(note) > LARGEST_NOTE or len(note.encode()) > LARGEST_NOTE + 96:
        raise SettingError(
            f"group {group}: the note of a position has {len(note)} characters ({len(note.encode())} bytes), "
            f"but at most {LARGEST_NOTE} are kept: store a digest instead"
        )


def check_offset(place: Place, offset: int) -> None:
    """Raise SettingError for a negative offset: clients read those as commands."""
    if offset < 0:
        raise SettingError(f"{place[0]}[{place[1]}]: offset {offset} was asked for; offsets are 0 or more")


def truncated(place: Place, position: int, end: int) -> LogTruncated:
    """The error for a position behind the end of the log."""
    return LogTruncated(
        f"{place[0]}[{place[1]}]: the log ends at {end}, but offset {position} was to be read: it was truncated, or "
        "made anew; do not go on with positions from before"
    )


def check_time(time_ms: int) -> None:
    """Raise SettingError for a time that is not milliseconds since 1970; a broker reads negative ones as commands."""
    if time_ms < 0:
        raise SettingError(f"a time of {time_ms} ms was asked for; times are milliseconds since 1970, 0 or more")


def check_existing(spec: TopicSpec, partitions: int, config: Mapping[str, str]) -> None:
    """Raise SettingError when a topic that exists already does not do for `spec`.

    Partitions must be equal, the largest message no smaller, times given by the same clock.
    """
    if partitions != spec.partitions:
        raise SettingError(
            f"topic {spec.name} exists with {partitions} partitions, but {spec.partitions} are asked for; the number "
            "is fixed for a run: use the old number, or another run name"
        )
    largest = "max.message.bytes"
    if largest in spec.config and int(config.get(largest, spec.config[largest])) < int(spec.config[largest]):
        raise SettingError(
            f"topic {spec.name} exists with {largest} = {config[largest]}, but {spec.config[largest]} is needed: "
            "raise it on the topic, or lower kafka.max_record_bytes"
        )
    clock = "message.timestamp.type"
    if clock in spec.config and config.get(clock, spec.config[clock]) != spec.config[clock]:
        raise SettingError(
            f"topic {spec.name} exists with {clock} = {config[clock]}, but {spec.config[clock]} is needed "
            "(with the writers' own clocks, retention deletes unread records of a slow one): alter the topic"
        )
