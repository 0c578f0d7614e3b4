"""Fetching: whole or not at all, whatever is cut, flipped, mixed up or spoilt on the disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infra.memory_store import MemoryStore
from infra.weights.fetch import fetch, fetched, load_manifest, prune
from infra.weights.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from schemas.errors import StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Version
from support.weights import POLICY, RUN, model, put, take


def test_of_a_thousand_faulty_reads_none_is_accepted(tmp_path: Path) -> None:
    """Bodies cut, flipped, swapped between shards and versions, or served under another manifest."""
    store, chance = MemoryStore(), random.Random(7)
    old = put(store, 1, num_shards=3).manifest
    new = put(store, 2, num_shards=3, parent=old).manifest
    keys = [info.key for info in store.list("")]
    true = {key: store.get(key) for key in keys}
    faults = 0

    def damaged(key: str, data: bytes) -> bytes:
        nonlocal faults
        if chance.random() > 0.15 and not (faults == 0 and key == last):
            return data
        kind = chance.choice(("cut", "flip", "swap", "empty", "grow"))
        changed = {
            "cut": data[: chance.randrange(len(data))],
            "flip": bytes(
                [*data[: (at := chance.randrange(len(data)))], data[at] ^ (1 << chance.randrange(8)), *data[at + 1 :]]
            ),
            "swap": true[chance.choice([other for other in keys if true[other] != data])],
            "empty": b"",
            "grow": data + b"x",
        }[kind]
        faults += 1
        return changed

    total, attempt = 0, 0
    while total < 1000:
        last, faults, root = blob_key(RUN, POLICY, new.files[-1].sha256), 0, tmp_path / str(attempt)
        store.on_get = damaged
        with pytest.raises((WeightsError, StoreError)):
            take(store, new, root)
        assert fetched(root) == [] and faults > 0
        total, attempt = total + faults, attempt + 1
    store.on_get = None
    assert (
        take(store, new, tmp_path / "0")["model-00001-of-00003.safetensors"]
        == true[blob_key(RUN, POLICY, next(e.sha256 for e in new.files if e.name.startswith("model-00001")))]
    )


def test_an_announced_digest_binds_the_manifest() -> None:
    store = MemoryStore()
    one, other = put(store, 1).manifest, put(store, 2).manifest
    with pytest.raises(WeightsError, match="was announced"):
        load_manifest(store, RUN, POLICY, Version(1, 1), other.digest)
    store.put(one.key, other.data)
    with pytest.raises(WeightsError, match="is the manifest of demo/main 1-2"):
        load_manifest(store, RUN, POLICY, Version(1, 1))


def test_a_manifest_that_lies_about_tensors_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    good = put(store, 1).manifest
    fields = {name: getattr(good, name) for name in Manifest.__dataclass_fields__}
    lying = Manifest(**{**fields, "tensors": (good.tensors[0]._replace(shape=(128, 2)), *good.tensors[1:])})
    with pytest.raises(WeightsError, match="not those of the manifest"):
        fetch(store, lying, lying.digest, tmp_path)
    assert fetched(tmp_path) == []


def test_a_version_too_large_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = put(store, 1).manifest
    with pytest.raises(WeightsError, match="at most 100 are accepted"):
        fetch(store, manifest, manifest.digest, tmp_path, 100)
    assert not store.gets


def test_a_fetch_that_was_cut_goes_on(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = put(store, 1, num_shards=3).manifest
    store.fail_next(1, after=3)
    with pytest.raises(StoreError):
        fetch(store, manifest, manifest.digest, tmp_path)
    assert fetched(tmp_path) == []
    part = tmp_path / ".part-1-1"
    (part / "model-00009-of-00009.safetensors").write_bytes(b"from elsewhere")
    (part / "config.json.tmp").write_bytes(b"half")
    (part / "config.json").write_bytes(model(1)["config.json"].upper())
    store.gets.clear()
    folder = fetch(store, manifest, manifest.digest, tmp_path)
    assert 0 < len(store.gets) < len(manifest.files)
    assert {path.name for path in folder.iterdir()} == {*model(1, 3), INDEX_NAME, MANIFEST_NAME}
    assert (folder / "config.json").read_bytes() == model(1)["config.json"]
    assert not part.exists()


def test_what_an_older_folder_holds_is_linked_and_checked_again(tmp_path: Path) -> None:
    store = MemoryStore()
    zero = put(store, 0).manifest
    one = put(store, 1, parent=zero).manifest
    take(store, zero, tmp_path)
    (tmp_path / "1-0" / "config.json").write_bytes(b'{"model_type": "evil"}')
    store.gets.clear()
    assert take(store, one, tmp_path) == model(1)
    tokenizer, config = ((tmp_path / "1-1" / name).stat() for name in ("tokenizer.json", "config.json"))
    assert (tokenizer.st_nlink, config.st_nlink) == (2, 1)
    assert len(store.gets) == 3  # manifest, weights, and the configuration that was spoilt


def test_a_whole_folder_is_used_again_but_not_when_it_is_spoilt(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = put(store, 1).manifest
    folder = fetch(store, manifest, manifest.digest, tmp_path)
    store.gets.clear()
    assert fetch(store, manifest, manifest.digest, tmp_path) == folder and not store.gets
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert take(store, manifest, tmp_path) == model(1)
    (folder / "adapter.bin").write_bytes(b"a stranger")
    assert take(store, manifest, tmp_path) == model(1)


def test_a_folder_of_another_run_with_the_same_number_is_replaced(tmp_path: Path) -> None:
    one, other = MemoryStore(), MemoryStore()
    take(one, put(one, 1).manifest, tmp_path)
    assert take(other, put(other, 1, files=model(8)).manifest, tmp_path) == model(8)


def test_old_folders_go_but_never_those_in_use(tmp_path: Path) -> None:
    store = MemoryStore()
    for version in range(5):
        take(store, put(store, version).manifest, tmp_path)
    (tmp_path / ".part-1-3").mkdir()
    (tmp_path / ".part-1-9").mkdir()
    (tmp_path / ".gone-1-1").mkdir()
    assert prune(tmp_path, keep=2, in_use=[Version(1, 0)]) == [Version(1, 2), Version(1, 1)]
    assert fetched(tmp_path) == [Version(1, 4), Version(1, 3), Version(1, 0)]
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".part-1-9"]
