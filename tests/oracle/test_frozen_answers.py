"""The frozen answers are still verl's, TRL's and AReaL's: needs them here (see the makers beside this file); skipped without."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.oracle


def _maker(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "packages"),
    [("make_advantages", ["verl"]), ("make_losses", ["verl", "trl"]), ("make_admission", ["areal"])],
)
def test_the_frozen_answers_are_theirs(name: str, packages: list[str]) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed beside {sys.executable}")
    maker = _maker(name)
    _same(json.loads(maker.FIXTURES.read_text("utf-8")), maker.make(), "")


def _same(frozen: Any, made: Any, at: str) -> None:
    if isinstance(frozen, dict):
        assert frozen.keys() == made.keys(), at
        for name in frozen:
            _same(frozen[name], made[name], f"{at}/{name}")
    elif isinstance(frozen, list) and frozen and not isinstance(frozen[0], str):
        assert len(frozen) == len(made), at
        for i, (one, other) in enumerate(zip(frozen, made, strict=True)):
            _same(one, other, f"{at}/{i}")
    elif isinstance(frozen, float):
        assert made == pytest.approx(frozen, rel=1e-5, abs=1e-6), at  # GDPO is float32
    else:
        assert frozen == made, at
