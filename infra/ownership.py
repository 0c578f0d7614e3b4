"""Taking ownership: append a claim to every partition that must be owned, read up to it, and see whether it won.

The rule itself is `schemas.rules.claims`; this file carries it out on a log.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from infra.log import Envelope, Log, Place, Reader
from schemas.codec import decode, encode
from schemas.errors import DeadlineExceeded, RecordError, Superseded
from schemas.records import Claim, Record
from schemas.rules.claims import Claims

Handle = Callable[[Envelope, Record], None]


def read_record(envelope: Envelope) -> Record | None:
    """The record of an envelope; None where it cannot be read (whoever owns its dead letters reports it)."""
    try:
        return decode(envelope.value or b"")
    except RecordError:
        return None


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
        self.epoch, self.nonce = 0, ""

    def saw(self, envelope: Envelope, claim: Claim) -> None:
        """Fold a claim. Raises Superseded when it takes a partition that this process owns."""
        claims = self._claims.get(envelope.place)
        if claims is None or claim.role != self.role:
            return
        owned = self.nonce and claims.owns(self.epoch, self.nonce)
        if claims.claim(claim.epoch, claim.nonce) and owned and not claims.owns(self.epoch, self.nonce):
            raise Superseded(
                f"{self.role} of {self.run}.{self.policy} with epoch {self.epoch} is superseded by epoch {claim.epoch} "
                f"in {envelope.topic}[{envelope.partition}] at offset {envelope.offset}: this process ends, the newer one goes on"
            )

    def counts(self, place: Place, epoch: int, nonce: str) -> bool:
        """Whether a record read now at this place, written under (epoch, nonce), counts."""
        claims = self._claims.get(place)
        return claims is not None and claims.owns(epoch, nonce)

    @property
    def claimed_before(self) -> bool:
        """Whether anybody has claimed one of the partitions."""
        return any(claims.epoch for claims in self._claims.values())

    def claim(self, log: Log, reader: Reader, handle: Callable[[Envelope], None], timeout_s: float) -> Claim:
        """Catch up, append a claim everywhere, read up to it. `handle` must call `saw` for claims. Raises Superseded."""
        catch_up(log, reader, self.places, handle, timeout_s)
        epoch = max(claims.next_epoch for claims in self._claims.values())
        nonce = secrets.token_hex(8)
        record = Claim(run=self.run, policy=self.policy, role=self.role, epoch=epoch, nonce=nonce)
        writer = log.writer()
        try:
            for place in self.places:
                writer.send(place.topic, place.partition, encode(record))
            writer.flush(timeout_s)
        finally:
            writer.close()
        catch_up(log, reader, self.places, handle, timeout_s)
        lost = [place for place, claims in self._claims.items() if not claims.owns(epoch, nonce)]
        if lost:
            raise Superseded(
                f"{self.role} of {self.run}.{self.policy}: another process claimed {lost[0].topic}[{lost[0].partition}] "
                f"at the same time (epoch {epoch}); this one ends"
            )
        self.epoch, self.nonce = epoch, nonce
        return record
