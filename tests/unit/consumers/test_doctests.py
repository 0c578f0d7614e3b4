"""Every worked number in a docstring of this room is true, and every estimator, shaper and group filter has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import consumers
from consumers.components import ADVANTAGES, GROUP_FILTERS, SHAPING

MODULES = sorted(found.name for found in pkgutil.walk_packages(consumers.__path__, "consumers."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    if any(
        target.startswith(f"{name}:") for table in (ADVANTAGES, GROUP_FILTERS, SHAPING) for target in table.values()
    ):
        assert result.attempted > 0
