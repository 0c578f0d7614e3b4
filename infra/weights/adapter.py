"""Adapters (LoRA, arXiv:2106.09685): published as two small matrices per weight, merged before an engine sees them.

    W' = W + (alpha / r) B A      W [O, I], A [R, I], B [O, R]; in float32, then rounded to W's own type

A version with an adapter holds its base's files unchanged (the same blobs for every version), and beside them the
adapter as peft writes it. Trainers and workers merge with this one function, so both publish or load the same bits,
but for the rounding of another machine's matrix product.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from infra.weights.header import Tensor, read_header, strict_json
from schemas.errors import WeightsError

ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
MERGED = "merged"
"""Folder beside fetched versions, for those that had an adapter."""

Floats: TypeAlias = npt.NDArray[np.float32]
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class Pair(NamedTuple):
    """The two matrices that change one weight."""

    a_RI: Floats
    b_OR: Floats


class Adapter(NamedTuple):
    """What is added to a base."""

    scale: float
    pairs: Mapping[str, Pair]
    """By the name of the weight in the base."""


def adapter_config(rank: int, alpha: float, targets: Sequence[str]) -> bytes:
    """The file adapter_config.json, as peft reads it.

    >>> json.loads(adapter_config(8, 16.0, ["v_proj", "q_proj"]))["target_modules"]
    ['q_proj', 'v_proj']
    """
    table: dict[str, Any] = {
        "base_model_name_or_path": None, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "lora_alpha": alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": rank, "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    return json.dumps(table, indent=1, sort_keys=True).encode()


def adapter_tensor(weight: str, letter: str) -> str:
    """The name of matrix A or B of a weight in the file adapter_model.safetensors.

    >>> adapter_tensor("model.layers.0.q_proj.weight", "A")
    'base_model.model.model.layers.0.q_proj.lora_A.weight'
    """
    return f"base_model.model.{weight.removesuffix('.weight')}.lora_{letter}.weight"


def read_adapter(config: bytes, data: bytes) -> Adapter:
    """The adapter in these two files. Raises WeightsError for any that this merging would not do justice to."""
    rank, alpha = _rank_and_alpha(config)
    found: dict[str, dict[str, Floats]] = {}
    for tensor in read_header(data, what=ADAPTER_NAME):
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            raise WeightsError(f"{ADAPTER_NAME}: {tensor.name[:80]!r} is no matrix of a LoRA adapter")
        found.setdefault(f"{match[1]}.weight", {})[match[2]] = _floats(tensor, data, ADAPTER_NAME)
    pairs: dict[str, Pair] = {}
    for name, both in found.items():
        shapes = [both[letter].shape for letter in sorted(both)]
        if len(shapes) != 2 or any(len(s) != 2 for s in shapes) or not shapes[0][0] == shapes[1][1] == rank:
            raise WeightsError(
                f"{ADAPTER_NAME}: the matrices of {name[:80]!r} are {shapes}, not [{rank}, I] and [O, {rank}]"
            )
        pairs[name] = Pair(both["A"], both["B"])
    return Adapter(alpha / rank, pairs)


def merged(adapter: Adapter, files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The base's safetensors files with the adapter in them, of the same names and layout.

    Raises WeightsError, at the latest after the last file, when the adapter does not fit the base.
    """
    left = set(adapter.pairs)
    for name, data in files:
        changed = [tensor for tensor in read_header(data, what=name) if tensor.name in adapter.pairs]
        whole = bytearray(data)
        for tensor in changed:
            whole[tensor.start : tensor.end] = _merged(tensor, data, adapter.pairs[tensor.name], adapter.scale, name)
        left -= {tensor.name for tensor in changed}
        yield name, bytes(whole)
    if left:
        raise WeightsError(
            f"the adapter changes {len(left)} tensors that its base does not have, as {min(left)[:80]!r}"
        )


def loadable(folder: Path) -> Path:
    """The folder of a verified version as an engine loads it: itself; with an adapter, `merged/` beside it.

    The merged folder is made anew at each call, from files that were just verified, and appears whole. Raises
    WeightsError when adapter and base do not fit.
    """
    if not (folder / ADAPTER_NAME).is_file():
        return folder
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        raise WeightsError(f"{folder} holds {ADAPTER_NAME} without {ADAPTER_CONFIG_NAME}")
    target = folder.parent / MERGED / folder.name
    part = target.with_name(f".part-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    adapter = read_adapter((folder / ADAPTER_CONFIG_NAME).read_bytes(), (folder / ADAPTER_NAME).read_bytes())
    paths = [path for path in sorted(folder.iterdir()) if path.name not in (ADAPTER_NAME, ADAPTER_CONFIG_NAME)]
    shards = [path for path in paths if path.suffix == ".safetensors"]
    for name, data in merged(adapter, ((path.name, path.read_bytes()) for path in shards)):
        (part / name).write_bytes(data)
    for path in paths:
        if path not in shards:
            _link(path, part / path.name)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return target


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # a file system without links
        target.hardlink_to(source)
        return
    shutil.copyfile(source, target)


def _rank_and_alpha(config: bytes) -> tuple[int, float]:
    """Of the one spelling that `adapter_config` gives, so that nothing in it can mean another formula."""
    table = strict_json(config, what=ADAPTER_CONFIG_NAME)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        rank, alpha, targets = table["r"], table["lora_alpha"], table["target_modules"]
        numbers = type(rank) is int and rank > 0 and type(alpha) in (int, float)
        if numbers and adapter_config(rank, alpha, targets) == config:
            return rank, float(alpha)
    raise WeightsError(f"{ADAPTER_CONFIG_NAME} is not that of a plain LoRA adapter, as this trainer writes it")


def _merged(tensor: Tensor, data: bytes, pair: Pair, scale: float, what: str) -> bytes:
    """The bytes of one merged tensor. A B of zeros leaves every bit as it is."""
    expected = (pair.b_OR.shape[0], pair.a_RI.shape[1])
    if tensor.shape != expected:
        raise WeightsError(f"{what}: {tensor.name[:80]!r} is {list(tensor.shape)}, but its adapter {list(expected)}")
    if not pair.b_OR.any():
        return data[tensor.start : tensor.end]
    return _to_bytes(_floats(tensor, data, what) + np.float32(scale) * (pair.b_OR @ pair.a_RI), tensor.dtype)


def _floats(tensor: Tensor, data: bytes, what: str) -> Floats:
    """A tensor in float32. Raises WeightsError for a type that adapters do not go with."""
    raw = memoryview(data)[tensor.start : tensor.end]
    if tensor.dtype == "BF16":
        flat: Floats = (np.frombuffer(raw, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif tensor.dtype in ("F32", "F16"):
        flat = np.frombuffer(raw, "<f4" if tensor.dtype == "F32" else "<f2").astype("<f4")
    else:
        raise WeightsError(f"{what}: {tensor.name[:80]!r} is {tensor.dtype}; adapters go with F32, F16 and BF16")
    return flat.reshape(tensor.shape)


def _to_bytes(values: Floats, dtype: str) -> bytes:
    """To the nearest number of the type, ties to even."""
    if dtype != "BF16":
        return values.astype("<f4" if dtype == "F32" else "<f2").tobytes()
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()
