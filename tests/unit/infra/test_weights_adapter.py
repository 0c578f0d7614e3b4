"""Adapters: merged by the formula, to the nearest number of each type; refused where they do not fit; published small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from infra.memory_store import MemoryStore
from infra.weights.adapter import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    MERGED,
    Adapter,
    Pair,
    adapter_config,
    adapter_tensor,
    loadable,
    merged,
    read_adapter,
)
from infra.weights.fetch import fetch, load_manifest, prune
from infra.weights.follower import Follower
from infra.weights.manifest import INDEX_NAME, Manifest
from infra.weights.publish import Known, Source, known, publish
from schemas.errors import StoreError, WeightsError
from schemas.names import blob_key
from schemas.records import Version
from support.weights import POLICY, RUN, model, shard

RANK, ALPHA = 2, 3.0
CONFIG = adapter_config(RANK, ALPHA, ["embed"])


def adapter(seed: int, weight: str = "embed", *, outputs: int = 64, inputs: int = 4, rank: int = RANK) -> bytes:
    random = np.random.default_rng(1000 + seed)
    return save(
        {
            adapter_tensor(weight, "A"): random.standard_normal((rank, inputs), dtype=np.float32),
            adapter_tensor(weight, "B"): random.standard_normal((outputs, rank), dtype=np.float32),
        }
    )


def version_files(seed: int, base: dict[str, bytes]) -> dict[str, bytes]:
    return {**base, ADAPTER_NAME: adapter(seed), ADAPTER_CONFIG_NAME: CONFIG}


def in_a_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def bf16(values: list[float]) -> bytes:
    """Upper halves of float32 numbers."""
    return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def file_of(dtype: str, shape: list[int], data: bytes) -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_each_weight_is_base_plus_scaled_product_and_other_tensors_stay(dtype: str) -> None:
    kind = np.float32 if dtype == "F32" else np.float16
    random = np.random.default_rng(0)
    base = {name: random.standard_normal((64, 4)).astype(kind) for name in ("embed.weight", "head.weight")}
    data = adapter(1)
    parts = load(data)
    ((name, found),) = merged(read_adapter(CONFIG, data), [("model.safetensors", save(base))])
    assert name == "model.safetensors"
    a_RI, b_OR = (parts[adapter_tensor("embed", letter)].astype(np.float64) for letter in "AB")
    expected = base["embed.weight"].astype(np.float64) + ALPHA / RANK * (b_OR @ a_RI)
    after = load(found)
    assert after["embed.weight"] == pytest.approx(expected, rel=1e-6 if dtype == "F32" else 1e-3, abs=1e-3)
    assert after["embed.weight"].dtype == kind and not np.array_equal(after["embed.weight"], base["embed.weight"])
    assert np.array_equal(after["head.weight"], base["head.weight"])


def test_bfloat16_is_rounded_to_the_nearest_ties_to_even() -> None:
    """Its neighbours above 1 are 2^-7 apart."""
    pair = Pair(np.ones((1, 1), np.float32), np.array([[2**-8], [3 * 2**-8], [2**-8 + 2**-12], [-(2**-8)]], np.float32))
    data = file_of("BF16", [4, 1], bf16([1.0, 1.0, 1.0, -1.0]))
    ((_, found),) = merged(Adapter(1.0, {"w": pair}), [("m", data)])
    assert found[-8:] == bf16([1.0, 1.0 + 2**-6, 1.0 + 2**-7, -1.0])


def test_an_adapter_of_zeros_leaves_every_bit() -> None:
    data = save({"w": np.array([[-0.0, 1.5]], np.float32)})
    zero = Pair(np.ones((1, 2), np.float32), np.zeros((1, 1), np.float32))
    assert dict(merged(Adapter(1.0, {"w": zero}), [("m", data)])) == {"m": data}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({ADAPTER_NAME: adapter(1, "tail")}, "does not have, as 'tail.weight'"),
        ({ADAPTER_NAME: adapter(1, inputs=5)}, r"'embed.weight' is \[64, 4\], but its adapter \[64, 5\]"),
        ({ADAPTER_NAME: adapter(1, rank=3)}, r"not \[2, I\] and \[O, 2\]"),
        ({ADAPTER_NAME: save({adapter_tensor("embed", "A"): np.zeros((2, 4), np.float32)})}, "the matrices of"),
        ({ADAPTER_NAME: save({"embed.weight": np.zeros((64, 4), np.float32)})}, "no matrix of a LoRA adapter"),
        ({ADAPTER_CONFIG_NAME: CONFIG.replace(b'"use_rslora": false', b'"use_rslora": true')}, "not that of a plain"),
        ({ADAPTER_CONFIG_NAME: CONFIG.replace(b"3.0", b'"3"')}, "not that of a plain"),
        ({ADAPTER_CONFIG_NAME: CONFIG.replace(b'"r": 2', b'"r": 0')}, "not that of a plain"),
        ({ADAPTER_CONFIG_NAME: b"[]"}, "not that of a plain"),
        ({"model.safetensors": save({"embed.weight": np.zeros((64, 4), np.int32)})}, "is I32"),
    ],
)
def test_what_does_not_fit_is_refused_and_no_folder_appears(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    base = {"model.safetensors": shard(0, ("embed.weight", "head.weight"))}
    folder = in_a_folder(tmp_path / "1-1", version_files(1, base) | files)
    with pytest.raises(WeightsError, match=said):
        loadable(folder)
    assert not (tmp_path / MERGED / "1-1").exists()


def test_the_merged_folder_has_every_other_file_and_is_made_anew(tmp_path: Path) -> None:
    base = model(0) | {"model.safetensors": shard(0, ("embed.weight", "head.weight"))}
    folder = in_a_folder(tmp_path / "1-1", version_files(1, base))
    found = loadable(folder)
    assert {path.name for path in found.iterdir()} == set(base)
    right = (found / "model.safetensors").read_bytes()
    (found / "model.safetensors").write_bytes(b"spoilt")
    assert loadable(folder) == found and (found / "model.safetensors").read_bytes() == right
    plain = in_a_folder(tmp_path / "1-2", base)
    assert loadable(plain) == plain
    (folder / ADAPTER_CONFIG_NAME).unlink()
    with pytest.raises(WeightsError, match=f"without {ADAPTER_CONFIG_NAME}"):
        loadable(folder)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def known_base(made: list[str]) -> dict[str, Source]:
    """A base of two shards, each read once; `made` counts how often its bytes were asked for again."""
    shards = {f"model-{n}.safetensors": shard(n, (f"{name}.weight",)) for n, name in enumerate(("embed", "head"))}

    def again(name: str) -> Callable[[], bytes]:
        return lambda: made.append(name) or shards[name]  # type: ignore[func-returns-value]

    return {name: known(name, data, again(name)) for name, data in shards.items()}


def test_a_version_costs_its_adapter_and_followers_get_it_merged(store: MemoryStore, tmp_path: Path) -> None:
    made: list[str] = []
    base = known_base(made)
    parent: Manifest | None = None
    beside = {"config.json": b"{}", "tokenizer.json": b"{}"}
    uploads = []
    for version in range(4):
        files = {**base, ADAPTER_NAME: adapter(version), ADAPTER_CONFIG_NAME: CONFIG}
        done = publish(
            store, None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=version, step=version - 1,
            files={**files, **(beside if version == 0 else {})}, parent=parent,
        )  # fmt: skip
        parent = done.manifest
        uploads.append(done.uploaded_bytes)
    assert sorted(made) == sorted(base) and uploads[1:] == [len(adapter(0))] * 3 and uploads[0] > sum(uploads[1:])
    follower = Follower(None, store, RUN, POLICY, tmp_path, 0.02)
    try:
        taken = follower.wait_first(20.0)
    finally:
        follower.close()
    assert (
        taken is not None
        and parent is not None
        and taken.folder == tmp_path / MERGED / "1-3"
        and taken.digest == parent.digest
    )
    names = {path.name for path in taken.folder.iterdir()} - {"offsetrl-manifest.json"}
    assert names == {*base, "config.json", "tokenizer.json", INDEX_NAME}
    assert set(json.loads((taken.folder / INDEX_NAME).read_text())["weight_map"]) == {"embed.weight", "head.weight"}
    assert (taken.folder / "model-1.safetensors").read_bytes() == shard(1, ("head.weight",))


def test_prune_takes_the_merged_folder_along(store: MemoryStore, tmp_path: Path) -> None:
    base = known_base([])
    parent: Manifest | None = None
    for version in range(3):
        files = {**base, ADAPTER_NAME: adapter(version), ADAPTER_CONFIG_NAME: CONFIG}
        parent = publish(
            store, None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=version, step=version - 1, files=files,
            parent=parent,
        ).manifest  # fmt: skip
        loadable(fetch(store, parent, parent.digest, tmp_path))
    prune(tmp_path, keep=1, in_use=[Version(1, 0)])
    assert sorted(path.name for path in (tmp_path / MERGED).iterdir()) == ["1-0", "1-2"]


def test_whole_weights_after_an_adapter_carry_nothing_of_it(store: MemoryStore, tmp_path: Path) -> None:
    first = publish(
        store, None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=0, step=-1,
        files={**known_base([]), ADAPTER_NAME: adapter(0), ADAPTER_CONFIG_NAME: CONFIG, "config.json": b"{}"}, parent=None,
    ).manifest  # fmt: skip
    whole = {"model.safetensors": shard(5, ("embed.weight",))}
    second = publish(
        store, None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=1, step=0, files=whole, parent=first
    ).manifest
    assert [entry.name for entry in second.files] == ["config.json", "model.safetensors"]
    folder = fetch(store, load_manifest(store, RUN, POLICY, second.name), second.digest, tmp_path)
    assert loadable(folder) == folder


def test_a_base_that_changed_since_it_was_read_is_not_sent(store: MemoryStore) -> None:
    good = shard(0, ("embed.weight",))
    entry = known("model.safetensors", good, lambda: shard(1, ("embed.weight",)))
    assert isinstance(entry, Known)
    with pytest.raises((WeightsError, StoreError), match="has changed since it was read"):
        publish(
            store, None, run=RUN, policy=POLICY, epoch=1, nonce="n", version=0, step=-1,
            files={"model.safetensors": entry}, parent=None,
        )  # fmt: skip
    assert store.size(blob_key(RUN, POLICY, entry.entry.sha256)) is None
