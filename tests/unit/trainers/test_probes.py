"""Every component of every table takes the inputs on which a trainer tries it, and refuses wrong settings on them."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from schemas.components import load
from schemas.errors import SettingError
from trainers import probes
from trainers.batch_corrections import BATCH_CORRECTIONS
from trainers.components import make_algorithms
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


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        ({"reduction": "seq-mean-token-sum-norm"}, {"horizon": 0}, "horizon is 0"),
        ({"correction": "icepop"}, {"low": 5.0, "high": 0.5}, "low must not be above high"),
        ({"further_corrections": ["opsm"]}, {"limit": -1.0}, "opsm: limit is -1.0"),
        ({"batch_corrections": ["m2po"]}, {"limit": -1.0}, "m2po: limit is -1.0"),
        ({"normalisers": ["whiten"]}, {"eps": -1.0}, "whiten: eps is -1.0"),
        ({"loss": "dual-clip"}, {"cap": 0.5}, "dual-clip: cap is 0.5"),
        ({"loss": "support.own_loss:negated"}, {"scale": math.nan}, r"gives \[nan, nan, nan\] for plain tokens"),
    ],
)
def test_settings_that_cannot_work_stop_a_trainer_at_its_start(
    names: dict[str, Any], settings: dict[str, float], said: str
) -> None:
    """Not at its first step, when it has claimed the policy and planned."""
    (value,) = names.values()
    name = value if isinstance(value, str) else value[0]
    with pytest.raises(SettingError, match=said):
        make_algorithms(**names, settings={name: settings})
