"""Taking ownership: append a claim to every partition that must be owned, read up to it, and see whether it won.

The rule itself is `schemas.rules.claims`; this file carries it out on a log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from infra.log import Bounds, Envelope, Log, Place, Reader
from schemas.codec import decode, encode
from schemas.errors import DeadlineExceeded, RecordError, Superseded
from schemas.records import Claim, Record
from schemas.rules.claims import Claims

_ROUNDS = 8
_STALL_S = 60.0


def read_record(envelope: Envelope) -> Record | None:
    """The record of an envelope; None where it cannot be read (whoever owns its dead letters reports it)."""
    try:
        return decode(envelope.value or b"")
    except RecordError:
        return None


def read_all(log: Log, place: Place, bounds: Bounds) -> Iterator[Envelope]:
    """Every record of a partition from its start up to the given end. Raises DeadlineExceeded when nothing comes."""
    reader = log.reader({place: bounds.start})
    moved = time.monotonic()
    try:
        while reader.position(place) < bounds.end:
            before = reader.position(place)
            for envelope in reader.poll(0.5):
                if envelope.offset < bounds.end:
                    yield envelope
            if reader.position(place) > before:
                moved = time.monotonic()
            elif time.monotonic() - moved > _STALL_S:
                raise DeadlineExceeded(
                    f"{place.topic}[{place.partition}]: nothing came for {_STALL_S:g} s at offset {before}, "
                    f"though it ends at {bounds.end}"
                )
    finally:
        reader.close()


def start_positions(log: Log, topics: Iterable[str]) -> dict[Place, int]:
    """The first offset still there, of every partition of these topics."""
    return {
        Place(topic, partition): bounds.start for topic in topics for partition, bounds in log.bounds(topic).items()
    }


def catch_up(
    log: Log, reader: Reader, places: Iterable[Place], handle: Callable[[Envelope], None], timeout_s: float
) -> None:
    """Read until every place has reached the end that it has now. Raises DeadlineExceeded naming what is missing."""
    deadline = time.monotonic() + timeout_s
    ends = {topic: log.bounds(topic) for topic in {place.topic for place in places}}
    goals = {place: ends[place.topic][place.partition].end for place in places}
    while behind := [place for place, goal in goals.items() if reader.position(place) < goal]:
        if time.monotonic() > deadline:
            place = behind[0]
            raise DeadlineExceeded(
                f"reading {place.topic}[{place.partition}] up to offset {goals[place]} took longer than {timeout_s:g} s; "
                f"position {reader.position(place)}"
            )
        for envelope in reader.poll(0.2):
            handle(envelope)


class Ownership:
    """The claims of the partitions that one process must own, folded as it reads them."""

    def __init__(self, role: str, run: str, policy: str, places: Iterable[Place]) -> None:
        self.role, self.run, self.policy = role, run, policy
        self.places = tuple(places)
        self._claims = {place: Claims() for place in self.places}
        self._floor = 0
        self.epoch, self.nonce = 0, ""
        self.nonces: set[str] = set()
        """Of every claim that this process has tried."""

    def resume(self, place: Place, epoch: int, nonce: str) -> None:
        """This claim owned the place where reading begins, as a note says."""
        self._claims[place].claim(epoch, nonce)

    def owner(self, place: Place) -> tuple[int, str]:
        """(epoch, nonce) of the claim that owns a place as far as it was read; epoch 0 before the first."""
        return self._claims[place].epoch, self._claims[place].nonce

    def saw(self, envelope: Envelope, claim: Claim) -> None:
        """Fold a claim. Raises Superseded when it takes a partition that this process owns."""
        if claim.role == self.role:
            self._fold(envelope, claim.epoch, claim.nonce)

    def proves(self, envelope: Envelope, epoch: int, nonce: str) -> bool:
        """Whether a record of an owner's, written under (epoch, nonce), counts where it stands.

        Only owners write, so it proves its own claim where retention has removed that one. Raises Superseded.
        """
        self._fold(envelope, epoch, nonce)
        claims = self._claims.get(envelope.place)
        return claims is not None and claims.owns(epoch, nonce)

    def heard(self, epoch: int) -> None:
        """This epoch was claimed, as a record elsewhere says: the next claim must be above it."""
        self._floor = max(self._floor, epoch)

    @property
    def claimed_before(self) -> bool:
        """Whether anybody has claimed one of the partitions."""
        return any(claims.epoch for claims in self._claims.values())

    def claim(self, log: Log, reader: Reader, handle: Callable[[Envelope], None], timeout_s: float) -> Claim:
        """Catch up, append a claim everywhere, read up to it. `handle` must call `saw` for claims. Raises Superseded.

        Two that claim at once may win some partitions each. The first partition decides: who lost it ends, and who won
        it claims once more with a higher epoch, so that one of them is left.
        """
        catch_up(log, reader, self.places, handle, timeout_s)
        for _ in range(_ROUNDS):
            record = self._append(log, timeout_s)
            catch_up(log, reader, self.places, handle, timeout_s)
            lost = [place for place, claims in self._claims.items() if not claims.owns(record.epoch, record.nonce)]
            if not lost:
                self.epoch, self.nonce = record.epoch, record.nonce
                return record
            if lost[0] == self.places[0]:
                break
        raise Superseded(
            f"{self.role} of {self.run}.{self.policy}: another process claimed {lost[0].topic}[{lost[0].partition}] "
            f"at the same time (epoch {record.epoch}); this one ends"
        )

    def _append(self, log: Log, timeout_s: float) -> Claim:
        epoch = max(self._floor + 1, *(claims.next_epoch for claims in self._claims.values()))
        record = Claim(run=self.run, policy=self.policy, role=self.role, epoch=epoch, nonce=secrets.token_hex(8))
        self.nonces.add(record.nonce)
        writer = log.writer()
        try:
            for place in self.places:
                writer.send(place.topic, place.partition, encode(record))
            writer.flush(timeout_s)
        finally:
            writer.close()
        return record

    def _fold(self, envelope: Envelope, epoch: int, nonce: str) -> None:
        claims = self._claims.get(envelope.place)
        if claims is None:
            return
        owned = self.nonce and claims.owns(self.epoch, self.nonce)
        if claims.claim(epoch, nonce) and owned:
            raise Superseded(
                f"{self.role} of {self.run}.{self.policy} with epoch {self.epoch} is superseded by epoch {epoch} "
                f"in {envelope.topic}[{envelope.partition}] at offset {envelope.offset}: this process ends, the newer one goes on"
            )
