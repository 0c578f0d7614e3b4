"""The mirror: verified, newest first, manifest last; goes on after a cut, and carries nothing corrupt."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import wiring
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.weights.fetch import fetch, listed, load_manifest
from infra.weights.mirror import mirror_once, run
from schemas.errors import SettingError, StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Version
from support.weights import POLICY, RUN, model, put


class FewWaits(Stop):
    """Asks to stop after a few waits."""

    left = 3

    def wait(self, timeout_s: float) -> bool:
        self.left -= 1
        if self.left == 0:
            self.request()
        return self.requested


@pytest.fixture
def source() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore()


def usable(store: MemoryStore, name: Version, root: Path) -> bool:
    manifest = load_manifest(store, RUN, POLICY, name)
    return (fetch(store, manifest, manifest.digest, root) / "config.json").read_bytes() == model(0)["config.json"]


def test_the_newest_versions_arrive_newest_first(source: MemoryStore, target: MemoryStore, tmp_path: Path) -> None:
    for version in range(5):
        put(source, version)
    copied = mirror_once(source, target, RUN, POLICY, newest=3)
    assert copied.versions == (Version(1, 4), Version(1, 3), Version(1, 2))
    assert copied.num_blobs == 5  # three weights; configuration and tokenizer once
    assert listed(target, RUN, POLICY) == list(copied.versions)
    assert all(usable(target, name, tmp_path) for name in copied.versions)
    manifests = [at for at, key in enumerate(target.puts) if "/manifests/" in key]
    assert manifests == [3, 5, 7]


def test_what_is_there_is_not_sent_again(source: MemoryStore, target: MemoryStore) -> None:
    zero = put(source, 0).manifest
    assert mirror_once(source, target, RUN, POLICY).num_blobs == 3
    assert mirror_once(source, target, RUN, POLICY).versions == ()
    one = put(source, 1, parent=zero)
    copied = mirror_once(source, target, RUN, POLICY)
    assert (copied.versions, copied.num_blobs, copied.size_bytes) == ((Version(1, 1),), 1, one.uploaded_bytes)


def test_a_limit_lets_a_newer_version_go_ahead(source: MemoryStore, target: MemoryStore) -> None:
    for version in range(3):
        put(source, version)
    assert mirror_once(source, target, RUN, POLICY, limit=1).versions == (Version(1, 2),)
    put(source, 3)
    assert mirror_once(source, target, RUN, POLICY, limit=1).versions == (Version(1, 3),)
    assert mirror_once(source, target, RUN, POLICY, limit=1).versions == (Version(1, 1),)


@pytest.mark.parametrize("cut", range(8))
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_cut_leaves_nothing_half_and_the_next_round_goes_on(
    source: MemoryStore, target: MemoryStore, tmp_path: Path, cut: int, side: str
) -> None:
    manifest = put(source, 1, num_shards=3).manifest
    {"source": source, "target": target}[side].fail_next(1, after=cut)
    with pytest.raises(StoreError, match="told to fail"):
        mirror_once(source, target, RUN, POLICY)
    assert listed(target, RUN, POLICY) == []
    sent = len(target.puts)
    mirror_once(source, target, RUN, POLICY)
    assert len(target.puts) == len(manifest.files) + 1
    assert sent <= len(manifest.files)
    assert usable(target, Version(1, 1), tmp_path)


def test_nothing_corrupt_is_carried_and_the_rest_is(source: MemoryStore, target: MemoryStore, tmp_path: Path) -> None:
    for version in range(3):
        put(source, version)
    bad = load_manifest(source, RUN, POLICY, Version(1, 1))
    weights = bad.file("model.safetensors")
    assert weights is not None
    key = blob_key(RUN, POLICY, weights.sha256)
    good = source.get(key)
    for spoil in (lambda: source.flip(key, 12345), lambda: source.truncate(key, 99), lambda: source.put(key, b"")):
        spoil()
        with pytest.raises(WeightsError, match="not mirrored"):
            mirror_once(source, target, RUN, POLICY)
        assert listed(target, RUN, POLICY) == [Version(1, 2), Version(1, 0)]
        assert target.size(key) is None
        source.put(key, good)
    mirror_once(source, target, RUN, POLICY)
    assert usable(target, Version(1, 1), tmp_path)


def test_half_a_blob_in_the_region_is_replaced(source: MemoryStore, target: MemoryStore, tmp_path: Path) -> None:
    entry = put(source, 0).manifest.files[0]
    target.put(blob_key(RUN, POLICY, entry.sha256), b"half")
    mirror_once(source, target, RUN, POLICY)
    assert usable(target, Version(1, 0), tmp_path)


def test_a_spoilt_manifest_stays_where_it_is(source: MemoryStore, target: MemoryStore) -> None:
    put(source, 0)
    source.truncate("demo/main/manifests/1-0.json", 40)
    with pytest.raises(WeightsError, match="not mirrored: manifest"):
        mirror_once(source, target, RUN, POLICY)
    assert not target.puts


def daemon(store: MemoryStore, region: str = "west") -> Daemon:
    settings = Settings.model_validate({"run": {"name": RUN}, "policies": {POLICY: {"model": "model"}}})
    return Daemon(settings, POLICY, "mirror", region, MemoryLog(), store, FewWaits())


def test_the_daemon_outlives_an_outage_and_mentions_it_once(
    source: MemoryStore, target: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wiring, "open_store", lambda settings, region: source)
    for version in range(5):
        put(source, version)
    source.fail_next(2)
    assert run(daemon(target)) == 0
    assert listed(target, RUN, POLICY) == [Version(1, 4), Version(1, 3), Version(1, 2)]
    said = capsys.readouterr()
    assert (said.out + said.err).count("mirroring fails") == 1


def test_the_daemon_needs_a_region(target: MemoryStore) -> None:
    with pytest.raises(SettingError, match="--region NAME"):
        run(daemon(target, region=""))
