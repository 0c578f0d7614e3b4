"""The frozen answers are still verl's: needs verl 0.9.1 in this environment (see make_advantages.py); skipped without."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.oracle


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_advantages", Path(__file__).with_name("make_advantages.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_the_frozen_answers_are_verls() -> None:
    if importlib.util.find_spec("verl") is None:
        pytest.skip(f"verl is not installed beside {sys.executable}")
    maker = _maker()
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
