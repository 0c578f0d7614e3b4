"""The reader's decisions against scripted feeds: no feed is used again after an error, silence is looked into."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from infra._kafka_reader import Batches, FeedAway, FeedUnreadable, KafkaReader
from infra.log import CORRUPT_HEADER, Bounds, Envelope, Place
from schemas.errors import BrokerError, SettingError

A, B = Place("a", 0), Place("b", 0)


def record(place: Place, offset: int) -> Envelope:
    return Envelope(*place, offset, 1, None, b"v%d" % offset)


class Cluster:
    """Two partitions of ten records; some offsets cannot be read checked, some not even unchecked."""

    def __init__(self) -> None:
        self.broken: set[tuple[Place, int]] = set()
        self.lost: set[tuple[Place, int]] = set()
        self.errors: list[Exception] = []
        self.away = False
        self.num_feeds = 0

    def open(self, positions: Mapping[Place, int], checked: bool) -> Feed:
        if self.away:
            raise BrokerError("nobody there")
        self.num_feeds += 1
        return Feed(self, dict(positions), checked)

    def bounds(self, place: Place) -> Bounds:
        return Bounds(0, 10)


class Feed:
    """As the client: after an error it may only be sought or closed, else it would never return."""

    def __init__(self, cluster: Cluster, at: dict[Place, int], checked: bool) -> None:
        self.cluster, self.at, self.checked, self.stuck = cluster, at, checked, False

    def poll(self, timeout_s: float, max_records: int) -> Batches:
        assert not self.stuck, "polled again after an error: the client would hang"
        self.stuck = True
        if self.cluster.errors:
            raise self.cluster.errors.pop(0)
        for place, offset in self.at.items():
            unreadable = self.cluster.broken if self.checked else self.cluster.lost
            if (place, offset) in unreadable:
                raise FeedUnreadable("checksum")
        self.stuck = False
        for place, offset in self.at.items():
            if offset < 10:
                self.at[place] += 1
                return [(place, [record(place, offset)])]
        return []

    def seek(self, place: Place, offset: int) -> None:
        self.at[place], self.stuck = offset, False

    def positions(self) -> dict[Place, int]:
        return dict(self.at)

    def ends(self, timeout_s: float) -> dict[Place, int]:
        if self.cluster.away:
            raise FeedAway("silence")
        return {place: 10 for place in self.at}

    def seen_end(self, place: Place) -> int | None:
        return 10 if self.at[place] else None

    def close(self) -> None: ...


def read(reader: KafkaReader, stop: Callable[[], bool]) -> list[Envelope]:
    got: list[Envelope] = []
    while not stop():
        got += reader.poll(0.01)
    return got


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def reader(cluster: Cluster) -> KafkaReader:
    return KafkaReader({A: 0, B: 0}, cluster.open, cluster.bounds, patience_s=0.2, where="here")


def done(reader: KafkaReader) -> bool:
    return reader.position(A) == 10 and reader.position(B) == 10


def test_errors_that_pass_lose_and_double_nothing(cluster: Cluster, reader: KafkaReader) -> None:
    cluster.errors = [FeedAway("cut"), FeedUnreadable("a torn answer"), FeedAway("cut")]
    got = read(reader, lambda: done(reader))
    assert [r.offset for r in got if r.place == A] == list(range(10))
    assert [r.offset for r in got if r.place == B] == list(range(10))
    assert cluster.errors == []


def test_the_end_is_what_the_newest_answer_said_and_never_before_the_position(reader: KafkaReader) -> None:
    assert reader.end(A) == 0  # nothing was answered yet
    read(reader, lambda: reader.position(A) > 2)
    assert reader.end(A) == 10
    reader.seek(A, 12)
    assert reader.end(A) == 12
    with pytest.raises(SettingError, match="not read here"):
        reader.end(Place("t", 9))


def test_broken_batches_are_told_apart_by_partition(cluster: Cluster, reader: KafkaReader) -> None:
    cluster.broken = {(B, 3), (B, 4), (B, 7), (A, 9)}
    cluster.lost = {(B, 4)}
    got = read(reader, lambda: done(reader))
    assert [r.offset for r in got if r.place == A] == list(range(10))
    assert [r.offset for r in got if r.place == B] == list(range(10))
    marked = {(r.place, r.offset): dict(r.headers)[CORRUPT_HEADER] for r in got if r.value is None}
    assert marked == {(B, 3): b"v3", (B, 4): b"", (B, 7): b"v7", (A, 9): b"v9"}


def test_a_broker_away_for_longer_than_the_patience_is_an_error_with_positions_kept(
    cluster: Cluster, reader: KafkaReader
) -> None:
    while reader.position(A) < 4:
        reader.poll(0.01)
    cluster.away = True
    cluster.errors = [FeedAway("cut")]
    with pytest.raises(BrokerError, match=r"Kafka at here has not answered .* while a\[0\], b\[0\]"):
        read(reader, lambda: False)
    assert reader.position(A) == 4
    cluster.away = False
    assert [r.offset for r in read(reader, lambda: done(reader)) if r.place == A] == list(range(4, 10))


def test_silence_is_looked_into(cluster: Cluster, reader: KafkaReader) -> None:
    reader.seek(A, 10)
    reader.seek(B, 10)
    cluster.away = True  # the feed itself goes on giving nothing, as the client does
    with pytest.raises(BrokerError, match="has not answered"):
        read(reader, lambda: False)


def test_an_error_that_nobody_is_to_blame_for_ends_within_the_patience(cluster: Cluster) -> None:
    broken = KafkaReader({A: 0}, _open_broken(cluster), cluster.bounds, patience_s=0.2, where="here")
    with pytest.raises(BrokerError, match="has not answered"):
        read(broken, lambda: False)


def _open_broken(cluster: Cluster) -> Callable[[Mapping[Place, int], bool], Feed]:
    """Feeds of all partitions fail, those of one partition alone do not."""
    num = 0

    def open_feed(positions: Mapping[Place, int], checked: bool) -> Feed:
        nonlocal num
        num += 1
        feed = Feed(cluster, dict(positions), checked)
        if num % 3 == 1:  # the reader's own; the two that follow look for the culprit
            cluster.errors = [FeedUnreadable("out of memory")]
        return feed

    return open_feed


def test_impossible_requests_are_refused(cluster: Cluster) -> None:
    with pytest.raises(SettingError, match="without any partition"):
        KafkaReader({}, cluster.open, cluster.bounds, patience_s=1, where="here")
    with pytest.raises(SettingError, match="offset -2"):
        KafkaReader({A: -2}, cluster.open, cluster.bounds, patience_s=1, where="here")
