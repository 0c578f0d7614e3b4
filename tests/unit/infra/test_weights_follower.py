"""The follower: newest, whole, never back; with and without a broker; and whatever is away comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.log import Log, TopicSpec
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.weights.announce import announcer, send
from infra.weights.fetch import fetched
from infra.weights.follower import FetchedWeights, Follower
from infra.weights.mirror import mirror_once
from infra.weights.publish import Published
from schemas.errors import DeadlineExceeded
from schemas.names import blob_key, topic
from schemas.records import Claim, Version
from support.weights import POLICY, RUN, model, put

TOPIC = topic(RUN, POLICY, "weights")
PATIENCE_S = 20.0


class Stopped:
    requested = True


def until(holds: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)


@pytest.fixture
def log() -> MemoryLog:
    made = MemoryLog()
    made.create([TopicSpec(TOPIC, 1)])
    return made


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    made: list[Follower] = []

    def start(log: Any, store: MemoryStore, **other: Any) -> Follower:
        made.append(Follower(log, store, RUN, POLICY, tmp_path / "weights", 0.02, **other))
        return made[-1]

    yield start
    for follower in made:
        follower.close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"weights-{POLICY}"]


def say(log: Log, published: Published) -> None:
    announcer(log, timeout_s=5)(published.announcement)


def wait_for(follower: Follower, version: Version) -> FetchedWeights:
    until(
        lambda: follower.latest is not None and follower.latest.version == version,
        f"version {version}; {follower.error}",
    )
    taken = follower.take()
    assert taken is not None and taken.version == version
    return taken


def read(weights: FetchedWeights) -> bytes:
    return (weights.folder / "model.safetensors").read_bytes()


def test_announced_versions_arrive_and_are_taken_once(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    follower = follow(log, store)
    assert follower.take() is None and follower.latest is None and follower.head is None
    zero = put(store, 0)
    say(log, zero)
    first = follower.wait_first(PATIENCE_S)
    assert first is not None and (first.version, first.digest) == (Version(1, 0), zero.manifest.digest)
    assert read(first) == model(0)["model.safetensors"]
    assert follower.take() is None
    say(log, put(store, 1, parent=zero.manifest))
    assert read(wait_for(follower, Version(1, 1))) == model(1)["model.safetensors"]
    assert follower.error == "" and follower.head == Version(1, 1)


def test_only_the_newest_is_fetched(log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]) -> None:
    for version in range(6):
        say(log, put(store, version))
    wait_for(follow(log, store), Version(1, 5))
    assert [key for key in store.gets if "/manifests/" in key] == ["demo/main/manifests/1-5.json"]


def test_what_was_not_announced_is_not_taken(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    say(log, put(store, 0))
    put(store, 1)
    follower = follow(log, store)
    wait_for(follower, Version(1, 0))
    say(log, put(store, 2))
    wait_for(follower, Version(1, 2))


def test_without_a_broker_the_bucket_is_enough(store: MemoryStore, follow: Callable[..., Follower]) -> None:
    for epoch, version in ((1, 9), (1, 10), (2, 4)):
        put(store, version, epoch=epoch)
    follower = follow(None, store)
    wait_for(follower, Version(2, 4))
    put(store, 11, epoch=1)
    put(store, 5, epoch=2)
    wait_for(follower, Version(2, 5))


def test_zombies_are_not_followed(log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]) -> None:
    say(log, put(store, 3))
    follower = follow(log, store)
    wait_for(follower, Version(1, 3))
    claim = Claim(run=RUN, policy=POLICY, role="train", epoch=2, nonce="n2", head_epoch=1, head_version=3)
    send(log, claim, timeout_s=5)
    say(log, put(store, 4))
    say(log, put(store, 5, epoch=2, nonce="n2"))
    wait_for(follower, Version(2, 5))
    assert "demo/main/manifests/1-4.json" not in store.gets


def test_a_region_takes_what_it_has_until_the_head_is_mirrored(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    """And nothing that is void: 1-9 comes from a trainer that was superseded."""
    region = MemoryStore()
    say(log, put(store, 1))
    mirror_once(store, region, RUN, POLICY)
    put(region, 9)
    send(
        log, Claim(run=RUN, policy=POLICY, role="train", epoch=2, nonce="n2", head_epoch=1, head_version=1), timeout_s=5
    )
    say(log, put(store, 2, epoch=2, nonce="n2"))
    follower = follow(log, region)
    wait_for(follower, Version(1, 1))
    until(lambda: "2-2 was announced, but is not whole in this bucket" in follower.error, "the reason")
    mirror_once(store, region, RUN, POLICY)
    wait_for(follower, Version(2, 2))
    until(lambda: follower.error == "", "all to be well")


@pytest.mark.parametrize("fault", ["flip", "truncate", "manifest"])
def test_a_corrupt_version_leaves_the_old_one_in_place(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower], fault: str, tmp_path: Path
) -> None:
    follower = follow(log, store)
    say(log, put(store, 0))
    wait_for(follower, Version(1, 0))
    bad = put(store, 1)
    key = bad.manifest.key if fault == "manifest" else blob_key(RUN, POLICY, bad.manifest.files[-2].sha256)
    good = store.get(key)
    store.truncate(key, 50) if fault == "truncate" else store.flip(key, 777)
    say(log, bad)
    until(lambda: "WeightsError" in follower.error, "the complaint")
    assert follower.latest is not None and follower.latest.version == Version(1, 0)
    assert fetched(tmp_path / "weights") == [Version(1, 0)] and follower.take() is None
    store.put(key, good)
    wait_for(follower, Version(1, 1))
    until(lambda: follower.error == "", "all to be well")


def test_a_corrupt_version_is_passed_over_by_the_next(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    follower = follow(log, store)
    bad = put(store, 1)
    store.flip(blob_key(RUN, POLICY, bad.manifest.files[0].sha256), 5)
    say(log, bad)
    until(lambda: "WeightsError" in follower.error, "the complaint")
    say(log, put(store, 2, files={"config.json": b"{}", "model.safetensors": model(2)["model.safetensors"]}))
    wait_for(follower, Version(1, 2))


def test_a_store_that_is_away_is_mentioned_once_and_tried_again(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower], capsys: pytest.CaptureFixture[str]
) -> None:
    say(log, put(store, 0))
    store.fail_next(5)
    follower = follow(log, store)
    wait_for(follower, Version(1, 0))
    said = capsys.readouterr()
    assert (said.out + said.err).count("cannot be followed") == 1
    assert (said.out + said.err).count("are followed again") == 1


def test_while_the_broker_is_away_the_bucket_is_read(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    log.away = True
    follower = follow(log, store)
    until(lambda: follower.error.startswith("BrokerError"), "the complaint")
    put(store, 0)
    wait_for(follower, Version(1, 0))
    log.away = False
    say(log, put(store, 1))
    wait_for(follower, Version(1, 1))
    until(lambda: follower.error == "", "all to be well")


def test_a_bug_does_not_end_the_thread(store: MemoryStore, follow: Callable[..., Follower]) -> None:
    def fails(key: str, data: bytes) -> bytes:
        raise RuntimeError("a bug of ours")

    store.on_get = fails
    put(store, 0)
    follower = follow(None, store)
    until(lambda: follower.error.startswith("bug: RuntimeError"), "the complaint")
    store.on_get = None
    wait_for(follower, Version(1, 0))


def test_it_never_goes_back(log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]) -> None:
    """Neither in the announcements nor in the bucket, even when newer manifests disappear."""
    follower = follow(None, store)
    newest = put(store, 7, epoch=2)
    wait_for(follower, Version(2, 7))
    store.delete([newest.manifest.key])
    put(store, 8, epoch=1)
    put(store, 6, epoch=2)
    count = store.num_lists + 3
    until(lambda: store.num_lists >= count, "a few looks into the bucket")
    assert follower.latest is not None and follower.latest.version == Version(2, 7)
    put(store, 9, epoch=2)
    wait_for(follower, Version(2, 9))


def test_folders_taken_stay_and_older_ones_go(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower], tmp_path: Path
) -> None:
    follower = follow(log, store, keep=1)
    say(log, put(store, 0))
    wait_for(follower, Version(1, 0))
    for version in range(1, 5):
        say(log, put(store, version))
        until(lambda: follower.latest and follower.latest.version.version == version, "the next version")  # noqa: B023
    until(lambda: fetched(tmp_path / "weights") == [Version(1, 4), Version(1, 0)], "the others to go")
    wait_for(follower, Version(1, 4))
    say(log, put(store, 5))
    wait_for(follower, Version(1, 5))
    say(log, put(store, 6))
    until(lambda: fetched(tmp_path / "weights") == [Version(1, 6), Version(1, 5), Version(1, 4)], "the first to go")


def test_a_wait_without_end_names_what_it_waited_for(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    follower = follow(log, store)
    with pytest.raises(
        DeadlineExceeded, match=r"no weights of demo/main within 0\.05 s.*demo/main/manifests/ in MemoryStore"
    ):
        follower.wait_first(0.05)
    assert follower.wait_first(5, Stopped()) is None


def test_a_restarted_follower_reads_nothing_twice(
    log: MemoryLog, store: MemoryStore, follow: Callable[..., Follower]
) -> None:
    say(log, put(store, 0))
    follower = follow(log, store)
    wait_for(follower, Version(1, 0))
    follower.close()
    store.gets.clear()
    wait_for(follow(log, store), Version(1, 0))
    assert store.gets == ["demo/main/manifests/1-0.json"]
