"""Small versions of weights, made of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from infra.store import ObjectStore
from infra.weights.fetch import fetch, load_manifest
from infra.weights.manifest import MANIFEST_NAME, Manifest
from infra.weights.publish import Published, publish
from schemas.records import Announcement

RUN, POLICY = "demo", "main"


def shard(seed: int, names: tuple[str, ...] = ("embed", "head"), size: int = 64) -> bytes:
    """A safetensors file of random float32 tensors [size, 4]."""
    random = np.random.default_rng(seed)
    return save({name: random.standard_normal((size, 4), dtype=np.float32) for name in names})


def model(seed: int, num_shards: int = 1) -> dict[str, bytes]:
    """Shards, configuration and tokenizer; only the shards depend on the seed."""
    files = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b'{"version": "1.0"}'}
    if num_shards == 1:
        return files | {"model.safetensors": shard(seed)}
    for number in range(1, num_shards + 1):
        name = f"model-{number:05}-of-{num_shards:05}.safetensors"
        files[name] = shard(seed * 100 + number, (f"layer{number}.w", f"layer{number}.b"))
    return files


def put(
    store: ObjectStore,
    version: int,
    *,
    epoch: int = 1,
    nonce: str = "n1",
    parent: Manifest | None = None,
    files: Mapping[str, bytes] | None = None,
    num_shards: int = 1,
    announced: list[Announcement] | None = None,
) -> Published:
    """Publish a version of seeded weights."""
    return publish(
        store,
        None if announced is None else announced.append,
        run=RUN, policy=POLICY, epoch=epoch, nonce=nonce, version=version, step=version - 1,
        files=model(version, num_shards) if files is None else files, parent=parent,
    )  # fmt: skip


def take(store: ObjectStore, manifest: Manifest, root: Path) -> dict[str, bytes]:
    """The files of a version, fetched under `root`."""
    folder = fetch(store, load_manifest(store, RUN, POLICY, manifest.name, manifest.digest), manifest.digest, root)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME}
