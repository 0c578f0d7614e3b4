"""Every worked number in a docstring of the trainers' algorithms is true, and every component of a table has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import trainers
from trainers.batch_corrections import BATCH_CORRECTIONS
from trainers.corrections import CORRECTIONS
from trainers.losses import LOSSES
from trainers.normalise import NORMALISERS
from trainers.reductions import REDUCTIONS

MODULES = sorted(found.name for found in pkgutil.walk_packages(trainers.__path__, "trainers."))
TABLES = (LOSSES, CORRECTIONS, BATCH_CORRECTIONS, NORMALISERS, REDUCTIONS)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    if any(target.startswith(f"{name}:") for table in TABLES for target in table.values()):
        assert result.attempted > 0
