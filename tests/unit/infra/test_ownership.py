"""Taking ownership: the newest claim wins, of two at once one is left, and retention of claims changes nothing."""

from __future__ import annotations

import random

import pytest

from infra.log import Envelope, Place, TopicSpec
from infra.memory_log import MemoryLog
from infra.ownership import Ownership, catch_up, read_all, read_record, start_positions
from schemas.codec import encode
from schemas.errors import DeadlineExceeded, Superseded
from schemas.records import Claim
from support.processor_scenes import records
from support.samples import claim

TOPIC = "demo.main.requests"
PLACES = [Place(TOPIC, n) for n in range(3)]


class Owner:
    """A process that claims all places."""

    def __init__(self, log: MemoryLog) -> None:
        self.log = log
        self.ownership = Ownership("dispatch", "demo", "main", PLACES)
        self.reader = log.reader(start_positions(log, [TOPIC]))

    def handle(self, envelope: Envelope) -> None:
        if isinstance(record := read_record(envelope), Claim):
            self.ownership.saw(envelope, record)

    def claim(self) -> Claim:
        return self.ownership.claim(self.log, self.reader, self.handle, 5.0)

    def read(self) -> None:
        for envelope in self.reader.poll(0.0):
            self.handle(envelope)


@pytest.fixture
def log() -> MemoryLog:
    made = MemoryLog()
    made.create([TopicSpec(TOPIC, 3)])
    return made


def send(log: MemoryLog, place: Place, value: bytes) -> None:
    writer = log.writer()
    writer.send(place.topic, place.partition, value)
    writer.close()


def test_the_first_claim_has_epoch_one_and_stands_everywhere(log: MemoryLog) -> None:
    owner = Owner(log)
    assert not owner.ownership.claimed_before
    assert owner.claim().epoch == 1
    assert [envelope.partition for envelope in records(log, TOPIC)] == [0, 1, 2]


def test_a_newer_claim_supersedes(log: MemoryLog) -> None:
    old, new = Owner(log), Owner(log)
    old.claim()
    assert new.claim().epoch == 2
    with pytest.raises(Superseded, match="epoch 1 is superseded by epoch 2"):
        old.read()
    new.read()


def test_claims_of_another_role_are_not_heeded(log: MemoryLog) -> None:
    owner = Owner(log)
    owner.claim()
    send(log, PLACES[1], encode(claim(role="train", epoch=99)))
    owner.read()


class Meeting:
    """A log on which another claimant's record stands first in some partitions, as when two claim at once."""

    def __init__(self, log: MemoryLog, first_in: set[int]) -> None:
        self.log, self.first_in = log, first_in

    def writer(self) -> object:
        if self.first_in:
            for partition in self.first_in:
                send(self.log, PLACES[partition], encode(claim(role="dispatch", epoch=1, nonce="other")))
            self.first_in = set()
        return self.log.writer()

    def __getattr__(self, name: str) -> object:
        return getattr(self.log, name)


def test_of_two_that_claim_at_once_the_first_partition_decides(log: MemoryLog) -> None:
    owner = Owner(log)
    owner.log = Meeting(log, {1, 2})  # type: ignore[assignment]
    assert owner.claim().epoch == 2, "it won the first partition, so it claims once more"


def test_who_loses_the_first_partition_ends(log: MemoryLog) -> None:
    owner = Owner(log)
    owner.log = Meeting(log, {0})  # type: ignore[assignment]
    with pytest.raises(Superseded, match="at the same time"):
        owner.claim()


@pytest.mark.parametrize("seed", range(10))
def test_one_of_many_is_left(log: MemoryLog, seed: int) -> None:
    rng = random.Random(seed)
    alive = []
    for _ in range(5):
        owner = Owner(log)
        owner.log = Meeting(log, {p for p in range(3) if rng.random() < 0.3})  # type: ignore[assignment]
        try:
            owner.claim()
            alive.append(owner)
        except Superseded:
            continue
    for owner in alive[:-1]:
        with pytest.raises(Superseded):
            owner.read()
    if alive:
        alive[-1].read()


def test_a_record_of_an_owner_proves_its_claim_when_retention_took_that(log: MemoryLog) -> None:
    first = Owner(log)
    nonce = first.claim().nonce
    log.delete_before(PLACES[0], 1)
    second = Owner(log)
    envelope = Envelope(TOPIC, 0, 5, 0, None, b"")
    assert second.ownership.proves(envelope, 1, nonce)
    assert not second.ownership.proves(envelope, 1, "other")
    assert second.claim().epoch == 2


def test_epochs_heard_of_elsewhere_are_passed(log: MemoryLog) -> None:
    owner = Owner(log)
    owner.ownership.heard(7)
    assert owner.claim().epoch == 8


def test_catching_up_names_what_it_waits_for(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    send(log, PLACES[0], encode(claim()))
    reader = log.reader({PLACES[0]: 0})
    monkeypatch.setattr(reader, "poll", lambda timeout_s: [])
    with pytest.raises(DeadlineExceeded, match=r"demo.main.requests\[0\] up to offset 1"):
        catch_up(log, reader, [PLACES[0]], lambda envelope: None, 0.02)


def test_reading_all_stops_at_the_given_end(log: MemoryLog) -> None:
    for _ in range(3):
        send(log, PLACES[0], b"x")
    bounds = log.bounds(TOPIC)[0]
    send(log, PLACES[0], b"later")
    assert [envelope.offset for envelope in read_all(log, PLACES[0], bounds)] == [0, 1, 2]
