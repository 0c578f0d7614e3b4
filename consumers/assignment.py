"""Assigning partitions: positions, notes and outcomes are read back, and the processor's memory is built again from them."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from infra.log import Bounds, Committed, Log, Place
from schemas.codec import decode
from schemas.errors import DeadlineExceeded, LogGap, LogTruncated, RecordError
from schemas.records import Outcome
from schemas.rules.chain import ReadBack
from schemas.rules.partition import PartitionState


@dataclass(slots=True)
class Assigned:
    """One partition: its state, up to where dead letters stand on the log, and what was committed last."""

    state: PartitionState[bytes]
    dead_until: int
    committed: Committed | None

    def committable(self) -> Committed | None:
        """The position to store, with the note to find everything again; None while an outcome is on its way."""
        found = self.state.committable()
        if found is None:
            return None
        position, read_back = found
        return Committed(position, _note(read_back, self.state.position))


def assign(
    log: Log, partitions: Collection[int] | None, *, source: str, samples: str, group: str, patience_s: float
) -> tuple[dict[int, Assigned], list[LogGap]]:
    """These partitions of `source` (None: all), ready to be read on from their state's position, and what retention took unread.

    Raises LogTruncated when a topic is shorter than what was committed, DeadlineExceeded, BrokerError.
    """
    bounds, sample_bounds = log.bounds(source), log.bounds(samples)
    places = [Place(source, partition) for partition in sorted(bounds if partitions is None else partitions)]
    committed = log.committed(group, places)
    assigned: dict[int, Assigned] = {}
    gaps: list[LogGap] = []
    for place in places:
        partition, stored = place.partition, committed.get(place)
        position = _position(place, bounds[partition], stored, gaps)
        note = _read_back_from(samples, partition, sample_bounds[partition], stored)
        assigned[partition] = Assigned(PartitionState(position, note), _dead_until(stored), stored)
    states = {Place(samples, partition): one.state for partition, one in assigned.items()}
    _read_back(log, states, sample_bounds, patience_s)
    return assigned, gaps


def _position(place: Place, bounds: Bounds, stored: Committed | None, gaps: list[LogGap]) -> int:
    wanted = stored.offset if stored else 0
    if wanted > bounds.end:
        raise LogTruncated(
            f"{place.topic}[{place.partition}]: the position is {wanted}, but the log ends at {bounds.end}: "
            "the log was truncated, or the topic made anew; give the run another name"
        )
    if wanted < bounds.start:
        gaps.append(LogGap(place.topic, place.partition, wanted, bounds.start))
    return max(wanted, bounds.start)


def _read_back_from(samples: str, partition: int, bounds: Bounds, stored: Committed | None) -> ReadBack | None:
    note = ReadBack.from_note(stored.note) if stored else None
    if note is not None and note.offset > bounds.end:
        raise LogTruncated(
            f"{samples}[{partition}]: outcomes up to offset {note.offset} were written, but the log ends at {bounds.end}: "
            "the log was truncated, or the topic made anew; give the run another name"
        )
    # Retention took what the note points at: the chain goes on with the first outcome that is still there.
    return None if note is not None and note.offset < bounds.start else note


def _read_back(
    log: Log, states: Mapping[Place, PartitionState[bytes]], bounds: Mapping[int, Bounds], patience_s: float
) -> None:
    """Feed the outcomes that stand on the log now. What others append meanwhile are repeats of what is due here."""
    starts = {
        place: bounds[place.partition].start if state.read_from is None else state.read_from
        for place, state in states.items()
    }
    starts = {place: start for place, start in starts.items() if start < bounds[place.partition].end}
    if not starts:
        return
    reader = log.reader(starts)
    deadline_s = time.monotonic() + patience_s
    try:
        while behind := [place for place in starts if reader.position(place) < bounds[place.partition].end]:
            for envelope in reader.poll(min(1.0, patience_s)):
                deadline_s = time.monotonic() + patience_s
                if (outcome := _outcome(envelope.value)) is not None:
                    states[envelope.place].read_back(envelope.offset, outcome)
            if time.monotonic() > deadline_s:
                place = behind[0]
                end = bounds[place.partition].end
                raise DeadlineExceeded(f"{place.topic}[{place.partition}]: no outcome came before offset {end}")
    finally:
        reader.close()


def _outcome(value: bytes | None) -> Outcome | None:
    try:
        record = decode(value)
    except RecordError:
        return None  # every reader passes over it, so it is not in the chain
    return record if isinstance(record, Outcome) else None


def _note(read_back: ReadBack, dead_until: int) -> str:
    """The rule's note, with the offset below which dead letters stand on the log (all sends were awaited).

    >>> _note(ReadBack(7, 41), 90)
    '{"samples": 7, "last": 41, "dead_until": 90}'
    """
    return json.dumps({**json.loads(read_back.to_note()), "dead_until": dead_until})


def _dead_until(stored: Committed | None) -> int:
    try:
        found = json.loads(stored.note)["dead_until"] if stored else 0
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0
