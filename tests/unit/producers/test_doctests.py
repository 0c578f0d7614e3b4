"""Every worked number in a docstring of the dispatcher's files is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import producers.curricula

MODULES = [
    "curriculum", "groups", "lengths", "numbers", "resuming", "standby", "task_order", "trails",
    *(f"curricula.{found.name}" for found in pkgutil.iter_modules(producers.curricula.__path__)),
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"producers.{name}"))
    assert result.attempted and not result.failed
