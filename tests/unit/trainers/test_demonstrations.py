"""Which training settings eat demonstrations: those that never look at how likely a token was to whoever made it."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

from infra.settings import TrainTable
from trainers.demonstrations import LOSSES_WITHOUT_LOGPROBS, takes_demonstrations
from trainers.losses import FITS, LOSSES

pytestmark = pytest.mark.model


@pytest.mark.parametrize("loss", LOSSES)
def test_only_losses_without_a_sampler_do(loss: str) -> None:
    table = TrainTable(loss=loss, correction="none", max_staleness=0)
    assert takes_demonstrations(table) is (loss in LOSSES_WITHOUT_LOGPROBS)


@pytest.mark.parametrize(
    "changes", [{"correction": "token-truncated"}, {"further_corrections": ["icepop"]}, {"batch_corrections": ["opsm"]}]
)
def test_no_correction_may_weigh_them(changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"loss": "supervised", "correction": "none", "max_staleness": 0}
    assert takes_demonstrations(TrainTable(**plain)) and not takes_demonstrations(TrainTable(**{**plain, **changes}))


def test_a_loss_of_ones_own_is_not_trusted_with_them() -> None:
    assert not takes_demonstrations(TrainTable(loss="my.module:loss", correction="none", max_staleness=0))


def test_such_losses_are_those_that_look_at_neither_sampler_nor_advantage() -> None:
    assert {name for name, fit in FITS.items() if fit.corrects and not fit.advantages} == LOSSES_WITHOUT_LOGPROBS


def test_doctests() -> None:
    result = doctest.testmod(importlib.import_module("trainers.demonstrations"))
    assert result.attempted and not result.failed
