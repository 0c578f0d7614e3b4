"""Publishing and fetching: whole or not at all, whatever is cut, flipped, mixed up or published again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from infra.memory_store import MemoryStore
from infra.weights.fetch import fetch, fetched, listed, load_manifest, prune
from infra.weights.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from infra.weights.publish import model_files, publish
from schemas.errors import ObjectMissing, StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Announcement, Version
from support.weights import POLICY, RUN, model, put, shard


def blobs(store: MemoryStore) -> set[str]:
    return {info.key.rpartition("/")[2] for info in store.list(f"{RUN}/{POLICY}/blobs/")}


def take(store: MemoryStore, manifest: Manifest, root: Path) -> dict[str, bytes]:
    folder = fetch(store, load_manifest(store, RUN, POLICY, manifest.name, manifest.digest), manifest.digest, root)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME}


def test_what_was_published_is_fetched_byte_for_byte(tmp_path: Path) -> None:
    store, announced = MemoryStore(), list[Announcement]()
    manifest = put(store, 1, announced=announced).manifest
    assert take(store, manifest, tmp_path) == model(1)
    assert [(a.epoch, a.version, a.manifest_digest, a.manifest_key) for a in announced] == [
        (1, 1, manifest.digest, "demo/main/manifests/1-1.json")
    ]
    assert announced[0].size_bytes == sum(map(len, model(1).values()))


def test_blobs_come_first_then_the_manifest_then_the_word() -> None:
    store = MemoryStore()
    seen: list[list[str]] = []
    publish(
        store, lambda a: seen.append(list(store.puts)), run=RUN, policy=POLICY, epoch=1, nonce="n", version=0, step=-1,
        files=model(0, 3), parent=None,
    )  # fmt: skip
    assert len(seen) == 1 and len(seen[0]) == 7
    assert seen[0][-1] == "demo/main/manifests/1-0.json"
    assert all("/blobs/" in key for key in seen[0][:-1])


@pytest.mark.parametrize("cut", range(7))
def test_a_publisher_that_dies_leaves_nothing_to_see_and_may_begin_again(cut: int, tmp_path: Path) -> None:
    """After any of its seven calls (two looks, four blobs, a manifest); then the same number is published with fewer shards."""
    store = MemoryStore()
    before = put(store, 1).manifest
    store.fail_next(1000, after=cut)
    with pytest.raises(StoreError, match="told to fail"):
        put(store, 2, parent=before, num_shards=3)
    store.fail_next(0)
    assert listed(store, RUN, POLICY) == [Version(1, 1)]
    with pytest.raises(ObjectMissing):
        load_manifest(store, RUN, POLICY, Version(1, 2))
    after = put(store, 2, parent=before, num_shards=2)
    got = take(store, after.manifest, tmp_path)
    assert set(got) == {*model(2, 2), INDEX_NAME}
    assert {name: got[name] for name in model(2, 2)} == model(2, 2)


def test_a_publisher_that_dies_before_the_word_only_repeats_the_word() -> None:
    store, announced = MemoryStore(), list[Announcement]()
    first = put(store, 1)
    count = len(store.puts)
    again = put(store, 1, parent=None, announced=announced)
    assert again.manifest == first.manifest and len(announced) == 1
    assert store.puts[count:] and all("/blobs/" in key for key in store.puts[count:])


def test_a_version_never_changes_once_it_stands() -> None:
    store = MemoryStore()
    first = put(store, 1).manifest
    with pytest.raises(WeightsError, match=r"1-1\.json is there already with other content: versions never change"):
        put(store, 1, files=model(99))
    assert load_manifest(store, RUN, POLICY, Version(1, 1)) == first


def test_half_a_manifest_is_replaced(tmp_path: Path) -> None:
    store = MemoryStore()
    first = put(store, 1).manifest
    store.truncate(first.key, 100)
    with pytest.raises(WeightsError):
        load_manifest(store, RUN, POLICY, Version(1, 1))
    assert take(store, put(store, 1, files=model(5)).manifest, tmp_path) == model(5)


def test_what_the_parent_has_is_not_sent_again() -> None:
    store = MemoryStore()
    zero = put(store, 0)
    assert zero.num_uploaded == 3
    one = put(store, 1, parent=zero.manifest, files={"model.safetensors": shard(1)})
    assert one.num_uploaded == 1 and one.uploaded_bytes == len(shard(1))
    assert {entry.name for entry in one.manifest.files} == set(model(0))
    assert one.manifest.parent == Version(1, 0) and one.manifest.parent_digest == zero.manifest.digest
    frozen = put(store, 2, parent=one.manifest, files=model(1))
    assert frozen.num_uploaded == 0


def test_blobs_of_older_ancestors_are_sent_again() -> None:
    """They may be garbage that is being collected just now."""
    store = MemoryStore()
    zero = put(store, 0).manifest
    one = put(store, 1, parent=zero).manifest
    assert put(store, 2, parent=one, files=model(0)).num_uploaded == 1


def test_a_blob_of_the_parent_that_is_gone_is_sent_again_or_missed_loudly() -> None:
    store = MemoryStore()
    zero = put(store, 0).manifest
    store.delete([blob_key(RUN, POLICY, entry.sha256) for entry in zero.files])
    with pytest.raises(StoreError, match=r"carried forward from 1-0, is gone; give the file again"):
        put(store, 1, parent=zero, files={"model.safetensors": shard(1)})
    assert put(store, 1, parent=zero).num_uploaded == 3


def test_shards_of_the_parent_are_never_carried_forward(tmp_path: Path) -> None:
    store = MemoryStore()
    three = put(store, 1, num_shards=3).manifest
    two = put(store, 2, parent=three, num_shards=2).manifest
    got = take(store, two, tmp_path)
    assert sorted(name for name in got if name.endswith(".safetensors")) == sorted(
        name for name in model(2, 2) if name.endswith(".safetensors")
    )
    assert set(json.loads(got[INDEX_NAME])["weight_map"].values()) == {
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    one = put(store, 3, parent=two).manifest
    assert INDEX_NAME not in take(store, one, tmp_path)


def test_files_that_an_engine_may_not_load_are_not_published() -> None:
    store = MemoryStore()
    for files in ({"config.json": b"{}"}, {"model.safetensors": b"x" * 100}, model(1) | {"modeling.py": b"import os"}):
        with pytest.raises(WeightsError):
            put(store, 1, files=files)
    assert not store.puts


def test_a_model_folder_gives_data_files_only(tmp_path: Path) -> None:
    for name, data in (model(1) | {"README.md": b"", "pytorch_model.bin": b"", "modeling.py": b""}).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "sub").mkdir()
    assert set(model_files(tmp_path)) == set(model(1))
    manifest = publish(
        MemoryStore(), None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=0, step=-1,
        files=model_files(tmp_path), parent=None,
    ).manifest  # fmt: skip
    assert {entry.name for entry in manifest.files} == set(model(1))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"needs config\.json and"):
        model_files(tmp_path)


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
