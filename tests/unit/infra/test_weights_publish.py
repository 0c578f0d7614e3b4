"""Publishing: whole or not at all, whatever is cut or published again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infra.memory_store import MemoryStore
from infra.s3_store import S3Store
from infra.weights.fetch import listed, load_manifest
from infra.weights.manifest import INDEX_NAME
from infra.weights.publish import model_files, publish
from schemas.errors import ObjectMissing, StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Announcement, Version
from support.weights import POLICY, RUN, model, put, shard, take


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


@pytest.mark.s3
def test_the_same_on_the_real_store(s3_endpoint: Any, tmp_path: Path) -> None:
    store = S3Store(
        endpoint_url=s3_endpoint.url, bucket=s3_endpoint.bucket, prefix=f"weights-{os.getpid()}", region_name="us-east-1",
        access_key=s3_endpoint.access_key, secret_key=s3_endpoint.secret_key, timeout_s=20.0,
    )  # fmt: skip
    zero = put(store, 0, num_shards=3).manifest
    one = put(store, 1, parent=zero, files={"model.safetensors": shard(1)})
    assert one.num_uploaded == 1
    assert listed(store, RUN, POLICY) == [Version(1, 1), Version(1, 0)]
    assert take(store, one.manifest, tmp_path) == model(1)
    assert {name: data for name, data in take(store, zero, tmp_path).items() if name != INDEX_NAME} == model(0, 3)
    with pytest.raises(WeightsError, match="there already with other content"):
        put(store, 1, files=model(2))
    assert put(store, 1, parent=zero, files={"model.safetensors": shard(1)}).manifest == one.manifest
    store.close()
