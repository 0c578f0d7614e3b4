"""Every component of every table takes the inputs on which a trainer tries it, and refuses wrong settings on them."""

from __future__ import annotations

import functools

import pytest
import torch

from schemas.components import load
from schemas.errors import SettingError
from trainers import probes
from trainers.batch_corrections import BATCH_CORRECTIONS
from trainers.corrections import CORRECTIONS
from trainers.losses import LOSSES
from trainers.normalise import NORMALISERS
from trainers.reductions import REDUCTIONS


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_take_it(name: str) -> None:
    assert torch.isfinite(load("loss", name, LOSSES)(probes.loss_inputs()).per_token_BT).all()


@pytest.mark.parametrize("name", sorted(CORRECTIONS) + sorted(BATCH_CORRECTIONS))
def test_corrections_take_it_and_weigh_fresh_tokens_by_one(name: str) -> None:
    inputs = probes.correction_inputs()
    weights_BT = load("correction", name, {**CORRECTIONS, **BATCH_CORRECTIONS})(inputs).weights_BT
    assert weights_BT[inputs.mask_BT].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", sorted(NORMALISERS))
def test_normalisers_take_it(name: str) -> None:
    assert torch.isfinite(load("normaliser", name, NORMALISERS)(probes.normaliser_inputs()).advantages_BT).all()


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reductions_take_it(name: str) -> None:
    reduction = load("reduction", name, REDUCTIONS)
    wanted = {"horizon": 4} if name.endswith("norm") else {}
    coefficients_BT = functools.partial(reduction, **wanted)(probes.mask(), probes.TOTALS)
    assert coefficients_BT[~probes.mask()].eq(0).all() and coefficients_BT[probes.mask()].gt(0).all()


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match="horizon is 0; it must be greater than 0"):
        load("reduction", "seq-mean-token-sum-norm", REDUCTIONS)(probes.mask(), probes.TOTALS, horizon=0)
