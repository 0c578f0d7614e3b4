"""Weights that do not load end every engine: it says so, refuses to go on, and never claims their version."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from producers.engine import Engine
from schemas.errors import EngineError
from schemas.records import Version
from support.engine_bench import Bench, engine, every_engine, prompt_of, seed_of_tokens


def truncated(source: Path, target: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[: len(data) // 2])


def one_tensor_missing(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors")


def another_shape(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, target / "model.safetensors")


def nothing_there(source: Path, target: Path) -> None:
    target.rmdir()


BREAKAGES = {
    ("scripted", True): [nothing_there],
    ("transformers", True): [nothing_there, truncated, one_tensor_missing, another_shape],
    ("transformers", False): [truncated],
    ("vllm", True): [truncated, one_tensor_missing],  # it starts anew after each
    ("vllm", False): [truncated],
}


def assert_unusable(engine: Engine, folder: Path) -> None:
    with pytest.raises(EngineError, match="must not be used"):
        engine.step()
    with pytest.raises(EngineError, match="must not be used"):
        engine.load(folder, Version(9, 10))
    assert engine.version < Version(9, 9)


@every_engine
def test_broken_weights_end_the_engine(bench: Bench, tmp_path: Path) -> None:
    for break_it in BREAKAGES[bench.name, bench.tie]:
        target = tmp_path / break_it.__name__
        target.mkdir()
        break_it(bench.folder, target)
        bench.submit("runs", prompt_of(6, 3), seed=seed_of_tokens(bench))
        bench.engine.step()
        with pytest.raises(EngineError, match="could not be loaded"):
            bench.engine.load(target, Version(9, 9))
        assert_unusable(bench.engine, bench.folder)
        bench.spoil()


@engine("scripted", True)
@pytest.mark.parametrize("by", ["step", "cancel"])
def test_broken_weights_that_waited_end_the_engine_when_they_are_due(bench: Bench, by: str, tmp_path: Path) -> None:
    with bench.mode("finish"):
        bench.submit("runs", prompt_of(4), seed=seed_of_tokens(bench, 2, 0), max_tokens=2)
        bench.engine.step()
        bench.engine.load(tmp_path / "gone", Version(9, 9))
        with pytest.raises(EngineError, match="could not be loaded"):
            bench.engine.step() if by == "step" else bench.engine.cancel("runs")
        assert_unusable(bench.engine, bench.folder)
    bench.spoil()
