"""The engines by name, made lazily: importing this package imports neither torch nor vLLM.

An engine is made by a function `make(folder, version, table, *, ...) -> producers.engine.Engine`, whose keyword-only
parameters are the engine's own settings. A new one needs one file and one line in `ENGINES`; one of your own is given
as `package.module:name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from infra.settings import RolloutTable
from producers.engine import Engine, GenerationRequest
from schemas import components
from schemas.errors import SettingError
from schemas.records import Version

ENGINES: Mapping[str, str] = {
    "vllm": "producers.engines.vllm_engine:make",
    "transformers": "producers.engines.transformers_engine:make",
    "scripted": "producers.engines.scripted_engine:make",
}
"""Name of an engine -> the function that makes it."""

_NEEDS = {
    "vllm": ("vllm", "'offsetrl[rollout-cpu]' or, on a GPU, 'offsetrl[rollout-gpu]'; or use the engine transformers"),
    "transformers": ("transformers", "'offsetrl[rollout]'"),
}
"""Name of an engine -> the package it needs, and what to install for it."""


def available() -> tuple[str, ...]:
    """Names of the engines whose packages are installed here."""
    return tuple(name for name in ENGINES if name not in _NEEDS or _installed(_NEEDS[name][0]))


def make_engine(name: str, *, folder: Path, version: Version, table: RolloutTable) -> Engine:
    """Start the engine `name` with the weights in `folder`, which are called `version`.

    Raises SettingError, before anything is loaded, for an unknown name or setting, a missing package, or a folder
    without a model; EngineError when the engine does not start.
    """
    make = _maker(name)
    settings = components.check_settings("engine", name, make, table.engine_settings)
    engine: Engine = make(folder, version, table, **settings)
    return engine


def warm_up(name: str) -> None:
    """Import what an engine will need, which takes seconds: to be done while weights are still on their way.

    An engine's module may have a function `warm_up` for what it imports lazily. Raises SettingError like `make_engine`.
    """
    prepare = getattr(sys.modules[_maker(name).__module__], "warm_up", None)
    if prepare is not None:
        prepare()


def model_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises SettingError when the folder holds no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise SettingError(f"{folder} holds no model: expected config.json and *.safetensors in it")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"{path} is not JSON: {error}") from error
    return config


def check_length(config: Mapping[str, Any], max_model_len: int) -> None:
    """Refuse, with SettingError, to run a model beyond the positions it has."""
    positions = int(config.get("max_position_embeddings", max_model_len))
    if max_model_len > positions:
        raise SettingError(
            f"max_model_len is {max_model_len}, but the model has {positions} positions: "
            f"set rollout.max_model_len to at most {positions}"
        )


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a folder's safetensors files, from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
    if not shapes:
        raise SettingError(f"{folder} holds no weights: expected *.safetensors in it")
    return shapes


def check_tensors(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse, with ValueError, weights whose tensors differ in name or shape from the first ones."""
    found = tensor_shapes(folder)
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        raise ValueError(f"{len(differing)} tensors differ in name or shape from the first weights: {differing[:5]}")


def check_request(request: GenerationRequest, max_model_len: int, vocab_size: int) -> None:
    """Refuse, with ValueError, a prompt that no engine could continue.

    >>> from schemas.records import Sampling
    >>> check_request(GenerationRequest(id="a", prompt=(1, 2, 3), sampling=Sampling(), seed=0), 3, 10)
    Traceback (most recent call last):
    ValueError: request 'a': a prompt of 3 tokens leaves no room for another; prompt and answer may hold 3
    """
    if not request.prompt:
        raise ValueError(f"request {request.id!r}: the prompt is empty; it needs at least one token")
    if len(request.prompt) >= max_model_len:
        raise ValueError(
            f"request {request.id!r}: a prompt of {len(request.prompt)} tokens leaves no room for another; "
            f"prompt and answer may hold {max_model_len}"
        )
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise ValueError(f"request {request.id!r}: a prompt token is not within 0 to {vocab_size - 1}")


def _maker(name: str) -> Callable[..., Any]:
    if name in _NEEDS and not _installed(_NEEDS[name][0]):
        package, remedy = _NEEDS[name]
        raise SettingError(f"engine {name!r} needs the package {package!r}, which is not installed: install {remedy}")
    return components.load("engine", name, ENGINES)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
