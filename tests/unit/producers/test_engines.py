"""`producers.engines`: names, settings, refusals, and that nothing heavy is imported before it is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from infra.settings import RolloutTable
from producers import engines
from producers.engine import GenerationRequest
from producers.engine_parts.swap import Swap
from producers.engines import available, make_engine
from producers.engines.scripted_engine import ScriptedEngine
from schemas.errors import SettingError
from schemas.records import Finish, Sampling, Version
from support.models import model_folder

V0 = Version(1, 0)


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, producers.engines, producers.tokenizer, producers.engines.scripted_engine\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    root = Path(engines.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("vlm", {}, "did you mean 'vllm'"),
        ("scripted", {"step": 1.0}, "did you mean 'step_s'"),
        ("scripted", {"step_s": "fast"}, "must be a number"),
        ("no.such.module:make", {}, "cannot import"),
        ("scripted", {"swap": "drain"}, "must be keep, recompute, finish"),
        ("transformers", {"swap": "drain"}, "must be keep, recompute, finish"),
        ("vllm", {"swap": "drain"}, "must be keep, recompute, finish"),
    ],
)
def test_names_and_settings_are_checked(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make_engine(name, folder=model_folder(), version=V0, table=RolloutTable(engine_settings=settings))


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "made"),
    [("scripted", "ScriptedEngine"), ("transformers", "TransformersEngine"), ("vllm", "VllmEngine")],
)
@pytest.mark.parametrize(("settings", "mode"), [({}, Swap.KEEP), ({"swap": "finish"}, Swap.FINISH)])
def test_the_mode_of_swaps_is_a_setting_of_every_engine(
    name: str, made: str, settings: dict[str, object], mode: Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(f"producers.engines.{name}_engine.{made}", lambda *_, **options: given.update(options))
    make_engine(name, folder=model_folder(), version=V0, table=RolloutTable(engine_settings=settings))
    assert given["swap"] is mode


def test_warming_up_checks_the_name_and_calls_the_engines_own_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="did you mean 'scripted'"):
        engines.warm_up("script")
    called = []
    engines.warm_up("scripted")  # has none of its own
    monkeypatch.setattr("producers.engines.scripted_engine.warm_up", lambda: called.append(True), raising=False)
    engines.warm_up("scripted")
    assert called == [True]


@pytest.mark.parametrize(("name", "extra"), [("vllm", "rollout-cpu"), ("transformers", r"rollout\]")])
def test_a_missing_package_is_met_with_the_extra_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(package: str) -> ModuleSpec | None:
        return None if package == name else found(package)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert name not in available() and "scripted" in available()
    with pytest.raises(SettingError, match=extra):
        make_engine(name, folder=tmp_path, version=V0, table=RolloutTable())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="holds no model"):
        make_engine("scripted", folder=tmp_path, version=V0, table=RolloutTable())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingError, match="not JSON"):
        make_engine("scripted", folder=tmp_path, version=V0, table=RolloutTable())


@pytest.mark.model
@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_more_positions_than_the_model_has_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match="at most 256"):
        make_engine(name, folder=model_folder(), version=V0, table=RolloutTable(max_model_len=257))


def test_a_given_function_answers() -> None:
    engine = ScriptedEngine(V0, answer=lambda request: [*sorted(request.prompt), 1])
    engine.submit(GenerationRequest(id="a", prompt=(9, 3, 5), sampling=Sampling(max_tokens=8), seed=0))
    engine.submit(GenerationRequest(id="b", prompt=(9, 3, 5), sampling=Sampling(max_tokens=2), seed=0))
    found = {generation.id: generation for _ in range(4) for generation in engine.step()}
    assert found["a"].tokens == (3, 5, 9, 1) and found["a"].finish == Finish.STOP
    assert found["b"].tokens == (3, 5) and found["b"].finish == Finish.LENGTH
    assert set(found["a"].logprobs) == {0.0}


@pytest.mark.model
def test_drawing_follows_the_distribution_and_never_takes_what_is_impossible() -> None:
    import torch

    from producers.engine_parts.sampling import draw

    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    num = 20_000
    drawn = Counter(draw(probs.log().expand(num, -1), [(seed, 3) for seed in range(num)]).tolist())
    assert drawn.keys() == {1, 3, 4}
    for token, count in drawn.items():  # five standard deviations
        expected = float(probs[token])
        assert abs(count / num - expected) < 5 * (expected * (1 - expected) / num) ** 0.5


@pytest.mark.model
def test_a_model_whose_files_do_not_fit_its_config_is_not_started(tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from schemas.errors import EngineError

    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        make_engine("transformers", folder=folder, version=V0, table=RolloutTable())
