"""Dead letters put back: what would become of each, told beforehand; then their original bytes, appended again.

A copy is a record of its own: same bytes, key and headers, with one more header that names the origin, and with an append
time of its own. The old record stays a dead letter, so the accounts close before and after. The forecast applies the
processor's own rules to the log as it stands. A letter is hostile until proven otherwise: it is put back only where it
says it came from, only if that is this policy's own trajectories, and only if the record there, while the log still has
it, is the same to the byte.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infra.arrivals import Origin, arrivals, dead_letters, origin, read_strictly, take, used_by_outcomes
from infra.audit import Source
from infra.dead_letters import Letter, Wanted, collect
from infra.log import Bounds, Envelope, Log
from schemas.errors import RecordError
from schemas.names import topic
from schemas.records import Close, DeadLetter, DeadReason, Trajectory
from schemas.rules.accounting import At
from schemas.rules.closing import Arrival, GroupCloser

REPLAYED_HEADER = "offsetrl-replayed-from"
"""On a copy: `topic/partition/offset` of the record that it repeats; a copy of a copy has several, the newest last."""
_CUT = re.compile(r"\[cut: (\d+) bytes, SHA-256 [0-9a-f]{64}\]\Z")


class Fate(enum.StrEnum):
    """What will become of a letter that is put back."""

    JOINS = "joins a group"
    CLOSES = "closes a group"
    LATE = "late"
    SUPERSEDED = "superseded"
    CLOSES_NOTHING = "closes nothing"
    UNREADABLE = "still unreadable"
    REPLAYED = "put back before"
    USED = "used by an outcome"
    NOTHING = "nothing to read"
    DOUBTFUL = "bytes of a broken batch"
    CUT = "only its beginning is kept"
    DIFFERS = "differs from its origin"
    FOREIGN = "not of this policy's trajectories"


HAS_EFFECT = frozenset({Fate.JOINS, Fate.CLOSES})
REFUSED = frozenset({Fate.NOTHING, Fate.DOUBTFUL, Fate.CUT, Fate.DIFFERS, Fate.FOREIGN})
"""Never put back. The bytes of a broken batch may look fine and be wrong: under a fresh checksum they would be trained on."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A letter and what will become of it."""

    letter: Letter
    fate: Fate


@dataclass(slots=True)
class _Seen:
    """What the forecast keeps of a letter's bytes."""

    digest: bytes
    refused: Fate | None
    record: Trajectory | Close | None


def forecast(
    log: Log, run: str, policy: str, wanted: Wanted, *, max_tokens: int, now_ms: int, force: bool = False
) -> list[Forecast]:
    """What will become of each wanted letter if all those that `chosen` gives are put back at `now_ms`, in this order."""
    source = Source(run, policy)
    name = topic(run, policy, "trajectories")
    bounds = log.bounds(name)
    seen: dict[Origin, _Seen] = {}

    def see(letter: DeadLetter) -> None:
        if wanted.has(letter.reason, origin(letter)):
            seen[origin(letter)] = _look(letter, source, name, bounds, max_tokens)

    letters, _ = collect(log, run, policy, see)
    used = used_by_outcomes(log, run, policy)
    # Letters first, trajectories last: whatever a letter names is then below these ends.
    bounds = log.bounds(name)
    dead = {At(*letter.origin[1:]) for letter in letters if letter.origin.topic == name} - used
    found: dict[Origin, Forecast] = {}
    by_partition: dict[int, list[Letter]] = defaultdict(list)
    for letter in letters:
        if (look := seen.get(letter.origin)) is None:
            continue
        if look.refused is not None:
            found[letter.origin] = Forecast(letter, look.refused)
        else:
            by_partition[letter.origin.partition].append(letter)
    for partition, here in by_partition.items():
        fold = _Fold(log, source, partition, bounds[partition], dead, max_tokens, here, seen)
        for letter in here:  # in the order of their positions, as `put_back` sends them
            fate = fold.fate(letter, At(partition, letter.origin.offset) in used, now_ms, force)
            found[letter.origin] = Forecast(letter, fate)
    return [found[letter.origin] for letter in letters if letter.origin in found]


def chosen(forecasts: Iterable[Forecast], *, force: bool) -> list[Letter]:
    """The letters to put back: those that will have an effect; with `force` also those that will have none."""
    return [f.letter for f in forecasts if f.fate in HAS_EFFECT or (force and f.fate not in REFUSED)]


def put_back(log: Log, run: str, policy: str, letters: Sequence[Letter], timeout_s: float) -> int:
    """Append the letters' original bytes to their partitions, and wait; how many. Raises SendFailed, DeadlineExceeded.

    After a failure some may stand there: a further forecast finds them "put back before".
    """
    positions = {letter.position for letter in letters}
    writer = log.writer()
    sent = 0
    try:
        for position, letter in dead_letters(log, run, policy):
            if letter is None or position not in positions:
                continue
            assert letter.topic == topic(run, policy, "trajectories") and letter.value is not None, origin(letter)
            headers = (*letter.headers, (REPLAYED_HEADER, str(origin(letter)).encode()))
            writer.send(letter.topic, letter.partition, letter.value, key=letter.key, headers=headers)
            sent += 1
        writer.flush(timeout_s)
    finally:
        writer.close()
    return sent


class _Fold:
    """One partition of trajectories read to its end: groups still open, what was put back before, and the origins' bytes."""

    def __init__(
        self,
        log: Log,
        source: Source,
        partition: int,
        bounds: Bounds,
        dead: set[At],
        max_tokens: int,
        letters: Iterable[Letter],
        seen: dict[Origin, _Seen],
    ) -> None:
        self._seen = seen
        self._closer: GroupCloser[None] = GroupCloser()
        self._replayed: set[bytes] = set()
        self._end = bounds.end
        wanted = {letter.origin.offset: seen[letter.origin].digest for letter in letters}
        for arrived in arrivals(log, source, partition, bounds, dead=dead, max_tokens=max_tokens, closer=self._closer):
            envelope = arrived.envelope
            self._replayed.update(value for header, value in envelope.headers if header == REPLAYED_HEADER)
            if envelope.offset in wanted and wanted[envelope.offset] == _digest(envelope):
                del wanted[envelope.offset]
        self._differing = {offset for offset in wanted if offset >= bounds.start}  # below: retention took the origin

    def fate(self, letter: Letter, used: bool, now_ms: int, force: bool) -> Fate:
        """What will become of a letter behind those asked for before."""
        record = self._seen[letter.origin].record
        if letter.origin.offset in self._differing:
            return Fate.DIFFERS
        if used or str(letter.origin).encode() in self._replayed:
            fate = Fate.USED if used else Fate.REPLAYED
            if force and record is not None:
                self._arrive(record, now_ms)
            return fate
        return Fate.UNREADABLE if record is None else self._arrive(record, now_ms)

    def _arrive(self, record: Trajectory | Close, now_ms: int) -> Fate:
        self._end += 1
        if isinstance(record, Close):
            closed = self._closer.close(record.group, offset=self._end - 1, time_ms=now_ms)
            return Fate.CLOSES_NOTHING if closed is None else Fate.CLOSES
        arrival = take(self._closer, record, self._end - 1, now_ms)
        return {Arrival.JOINED: Fate.JOINS, Arrival.LATE: Fate.LATE, Arrival.SUPERSEDED: Fate.SUPERSEDED}[arrival]


def _look(letter: DeadLetter, source: Source, name: str, bounds: dict[int, Bounds], max_tokens: int) -> _Seen:
    """Examine a letter while its bytes are at hand."""
    refused = _refused(letter, name, bounds)
    record: Trajectory | Close | None = None
    if refused is None:
        try:
            record = read_strictly(letter.value, source, letter.partition, max_tokens)
        except RecordError:
            record = None
    if isinstance(record, Trajectory):  # thousands of these are held: without their columns
        record = dataclasses.replace(record, tokens=b"", loss_mask=b"", logprobs=b"", versions=(), segments=())
    return _Seen(_digest(letter), refused, record)


def _refused(letter: DeadLetter, name: str, bounds: dict[int, Bounds]) -> Fate | None:
    if letter.topic != name or letter.partition not in bounds:
        return Fate.FOREIGN
    if not letter.value and letter.reason == DeadReason.EMPTY:
        return Fate.NOTHING
    if letter.reason == DeadReason.CORRUPT_BATCH:
        return Fate.DOUBTFUL
    cut = _CUT.search(letter.detail)
    if cut is not None and int(cut[1]) != len(letter.value or b""):
        return Fate.CUT
    return Fate.NOTHING if not letter.value else None


def _digest(record: Envelope | DeadLetter) -> bytes:
    """Of everything that a copy repeats."""
    start = repr((record.key, tuple((str(name), bytes(value)) for name, value in record.headers))).encode()
    return hashlib.sha256(start + b"\0" + (record.value or b"")).digest()
