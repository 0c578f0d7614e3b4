"""Every example in a docstring of the engines' parts is true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "engines",
        "engine_parts.answer",
        "engine_parts.swap",
        pytest.param("engine_parts.sampling", marks=pytest.mark.model),
    ],
)
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"producers.{name}"))
    assert result.attempted and not result.failed
