"""What stands on a policy's topics, told again by the rules that every reader applies: for people's questions.

One reading of `dead-letters`, `samples` or `trajectories` each, record by record, so that memory holds no payloads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from infra.audit import Source
from infra.log import Bounds, Envelope, Log, Place
from infra.ownership import read_all, read_record
from schemas.codec import decode
from schemas.errors import RecordError
from schemas.names import topic
from schemas.records import Close, DeadLetter, DeadReason, Outcome, Trajectory
from schemas.rules.accounting import At
from schemas.rules.chain import Chain
from schemas.rules.closing import Arrival, GroupCloser
from schemas.validate import check_trajectory


class Origin(NamedTuple):
    """Where a dead letter's record stands, or stood."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Arrived(NamedTuple):
    """A record of `trajectories`; `record` is None where it is a dead letter or unreadable, `arrival` for all but trajectories."""

    envelope: Envelope
    record: Trajectory | Close | None
    arrival: Arrival | None


def dead_letters(log: Log, run: str, policy: str) -> Iterator[tuple[int, DeadLetter | None]]:
    """(offset on the topic, letter) in order, repeats included; None for what is no dead letter itself."""
    name = topic(run, policy, "dead-letters")
    for partition, bounds in sorted(log.bounds(name).items()):
        for envelope in read_all(log, Place(name, partition), bounds):
            record = read_record(envelope)
            yield envelope.offset, record if isinstance(record, DeadLetter) else None


def origin(letter: DeadLetter) -> Origin:
    """Where its record stands."""
    return Origin(letter.topic, letter.partition, letter.offset)


def used_by_outcomes(log: Log, run: str, policy: str) -> set[At]:
    """Every record of `trajectories` that an effective outcome names."""
    name, used = topic(run, policy, "samples"), set()
    for partition, bounds in log.bounds(name).items():
        chain = Chain()
        for envelope in read_all(log, Place(name, partition), bounds):
            record = read_record(envelope)
            if isinstance(record, Outcome) and chain.take(record.previous, record.closing_offset):
                used |= {At(partition, member.offset) for member in record.members}
    return used


def arrivals(
    log: Log,
    source: Source,
    partition: int,
    bounds: Bounds,
    *,
    dead: Collection[At],
    max_tokens: int,
    closer: GroupCloser[None],
) -> Iterator[Arrived]:
    """Every record of a partition with what the closing rule makes of it; `closer` then holds the groups still open.

    `dead`: records whose dead letter counts. They stay out even where this version could read them.
    """
    name = topic(source.run, source.policy, "trajectories")
    for envelope in read_all(log, Place(name, partition), bounds):
        record = None
        if At(partition, envelope.offset) not in dead:
            record = sound(envelope.value, source, partition, max_tokens)
        arrival = None
        if isinstance(record, Trajectory):
            arrival = take(closer, record, envelope.offset, envelope.time_ms)
        elif record is not None:
            closer.close(record.group, offset=envelope.offset, time_ms=envelope.time_ms)
        yield Arrived(envelope, record, arrival)


def sound(value: bytes | None, source: Source, partition: int, max_tokens: int) -> Trajectory | Close | None:
    """The record that a processor would take; None for what it would make a dead letter."""
    try:
        return read_strictly(value, source, partition, max_tokens)
    except RecordError:
        return None


def read_strictly(value: bytes | None, source: Source, partition: int, max_tokens: int) -> Trajectory | Close:
    """The record that a processor would take. Raises RecordError as it would."""
    record = decode(value)
    if isinstance(record, Trajectory):
        check_trajectory(record, run=source.run, policy=source.policy, partition=partition, max_tokens=max_tokens)
        return record
    if not isinstance(record, Close):
        raise RecordError(DeadReason.WRONG_KIND, f"a {type(record).__name__}")
    if (record.run, record.policy, record.partition) != (source.run, source.policy, partition):
        raise RecordError(
            DeadReason.WRONG_PLACE, f"a close record for {record.run}.{record.policy}[{record.partition}]"
        )
    return record


def take(closer: GroupCloser[None], record: Trajectory, offset: int, time_ms: int) -> Arrival:
    """Let a trajectory arrive."""
    arrival, _ = closer.add(
        record.group,
        size=record.group_size,
        index=record.index,
        offset=offset,
        time_ms=time_ms,
        first_request_time_ms=record.first_request_time_ms,
        lifetime_ms=record.lifetime_ms,
        payload=None,
    )
    return arrival
