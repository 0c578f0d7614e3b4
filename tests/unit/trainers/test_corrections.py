"""Corrections against their formulae, and as what they must be: weights without a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.corrections import CorrectionInputs
from trainers.corrections.none import none
from trainers.corrections.token_truncated import token_truncated
from trainers.losses import log_ratio


def weigh(proximal: list[float], behaviour: list[float], mask: list[int]) -> CorrectionInputs:
    bits = torch.tensor([mask], dtype=torch.bool)
    return CorrectionInputs(
        log_weight_BT=log_ratio(torch.tensor([proximal]), torch.tensor([behaviour]), bits), mask_BT=bits
    )


@settings(deadline=None)
@given(st.floats(-30, 0), st.floats(-30, 0), st.floats(1, 10))
def test_token_truncated_is_its_formula(proximal: float, behaviour: float, cap: float) -> None:
    out = token_truncated(weigh([proximal], [behaviour], [1]), cap=cap)
    weight = math.exp(min(max(proximal - behaviour, -20), 20))
    assert out.weights_BT.item() == pytest.approx(min(weight, cap), rel=1e-4)


def test_only_large_weights_are_cut_and_counted() -> None:
    out = token_truncated(weigh([-1.0, -1.0, -1.0], [-0.1, -1.0, -4.0], [1, 1, 1]))
    assert out.weights_BT[0].tolist() == pytest.approx([math.exp(-0.9), 1.0, 2.0])
    assert out.figures_BT["truncated"][0].tolist() == [0.0, 0.0, 1.0]


def test_weights_carry_no_gradient() -> None:
    proximal = torch.tensor([[-1.0]], requires_grad=True)
    mask = torch.tensor([[True]])
    out = token_truncated(
        CorrectionInputs(log_weight_BT=log_ratio(proximal, torch.tensor([[-1.5]]), mask), mask_BT=mask)
    )
    assert not out.weights_BT.requires_grad


@pytest.mark.parametrize("poison", [math.nan, -math.inf, -100.0])
def test_what_stands_at_masked_places_does_not_matter(poison: float) -> None:
    out = token_truncated(weigh([-1.0, poison], [-1.5, poison], [1, 0]))
    assert torch.isfinite(out.weights_BT).all()
    assert out.figures_BT["truncated"].sum().item() == 0


def test_none_is_one_everywhere() -> None:
    assert none(weigh([-1.0, -9.0], [-9.0, -1.0], [1, 1])).weights_BT.tolist() == [[1.0, 1.0]]
