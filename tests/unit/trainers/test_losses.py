"""Losses and reductions against slow twins written from the formulae, and against what must never reach a gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.errors import SettingError
from trainers.components import make_algorithms
from trainers.losses import LossInputs, LossOutputs
from trainers.losses.ppo_clip import ppo_clip
from trainers.losses.reinforce import reinforce
from trainers.reductions import Totals, seq_mean_token_mean, seq_mean_token_sum_norm, token_mean

LOSSES = [ppo_clip, reinforce]
LOW, HIGH = 0.2, 0.28


def inputs(
    logprobs: list[float], proximal: list[float], advantages: list[float], mask: list[int] | None = None
) -> LossInputs:
    tensor = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    bits = torch.tensor([mask or [1] * len(logprobs)], dtype=torch.bool)
    return LossInputs(
        logprobs_BT=tensor,
        proximal_BT=torch.tensor([proximal], dtype=torch.float64),
        behaviour_BT=torch.tensor([proximal], dtype=torch.float64),
        advantages_BT=torch.tensor([advantages], dtype=torch.float64),
        mask_BT=bits,
    )


def gradient(loss: Any, given_inputs: LossInputs) -> tuple[Tensor, Tensor]:
    out: LossOutputs = loss(given_inputs)
    (slope,) = torch.autograd.grad(out.per_token_BT.sum(), given_inputs.logprobs_BT)
    return out.per_token_BT.detach(), slope


def ppo_twin(logprob: float, proximal: float, advantage: float) -> tuple[float, float]:
    """(x, dx/dl) of one token, straight from the paper."""
    ratio = math.exp(logprob - proximal)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    taken = min(ratio * advantage, clipped * advantage)
    moves = ratio * advantage <= clipped * advantage
    return -taken, -ratio * advantage if moves else 0.0


small = st.floats(-3, 0, allow_nan=False)
tokens = st.lists(st.tuples(small, small, st.floats(-2, 2)), min_size=1, max_size=6)


@settings(deadline=None)
@given(tokens)
def test_ppo_clip_is_its_formula_in_value_and_gradient(values: list[tuple[float, float, float]]) -> None:
    found, slope = gradient(ppo_clip, inputs(*map(list, zip(*values, strict=True))))
    for i, (logprob, proximal, advantage) in enumerate(values):
        ratio = math.exp(logprob - proximal)
        if min(abs(ratio - (1 - LOW)), abs(ratio - (1 + HIGH))) < 1e-9:
            continue  # at the kink two slopes are right
        x, dx = ppo_twin(logprob, proximal, advantage)
        assert found[0, i].item() == pytest.approx(x, abs=1e-9)
        assert slope[0, i].item() == pytest.approx(dx, abs=1e-9)


@settings(deadline=None)
@given(tokens)
def test_on_policy_ppo_and_reinforce_have_the_same_gradient(values: list[tuple[float, float, float]]) -> None:
    logprobs, _, advantages = map(list, zip(*values, strict=True))
    _, of_ppo = gradient(ppo_clip, inputs(logprobs, logprobs, advantages))
    _, of_reinforce = gradient(reinforce, inputs(logprobs, logprobs, advantages))
    torch.testing.assert_close(of_ppo, of_reinforce)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [-50.0, -100.0, math.nan, math.inf, -math.inf])
def test_a_masked_token_contributes_exactly_nothing(loss: Any, poison: float) -> None:
    mask = [1, 1, 0, 0, 1]
    clean_x, clean_slope = gradient(loss, inputs([-1.0] * 5, [-1.1] * 5, [1.0] * 5, mask))
    for place in ("logprobs", "proximal", "advantages"):
        columns = {"logprobs": [-1.0] * 5, "proximal": [-1.1] * 5, "advantages": [1.0] * 5}
        columns[place] = [value if bit else poison for value, bit in zip(columns[place], mask, strict=True)]
        x, slope = gradient(loss, inputs(**columns, mask=mask))
        assert torch.equal(x, clean_x), place
        assert torch.equal(slope, clean_slope), place
        assert x[0, 2].item() == 0 and slope[0, 2].item() == 0


def test_an_unmasked_extreme_ratio_is_bounded() -> None:
    x, slope = gradient(ppo_clip, inputs([-1.0, -1.0], [-100.0, -100.0], [1.0, -1.0]))
    assert x[0, 0].item() == pytest.approx(-(1 + HIGH))
    assert x[0, 1].item() == pytest.approx(math.exp(20))
    assert torch.isfinite(slope).all()


def test_token_mean_divides_by_the_whole_step() -> None:
    """Two tokens of loss 1 and eight of loss 0: 0.2 however they are cut, never the 0.5 of a mean of means."""
    totals = Totals(tokens=10, sequences=2)
    ones, zeros = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 8, dtype=torch.bool)
    assert (token_mean(ones, totals) * 1.0).sum().item() + (
        token_mean(zeros, totals) * 0.0
    ).sum().item() == pytest.approx(0.2)


def test_token_mean_counts_what_the_numerator_counts() -> None:
    """30 tokens of which 5 are masked: the sum is over 25 and the denominator is 25."""
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2] = False
    assert token_mean(mask, Totals(tokens=25, sequences=5)).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", [token_mean, seq_mean_token_mean])
def test_nothing_trainable_gives_zero_and_no_nan(reduction: Any) -> None:
    coefficients = reduction(torch.zeros(2, 3, dtype=torch.bool), Totals(tokens=0, sequences=0))
    assert torch.equal(coefficients, torch.zeros(2, 3))


def test_sequence_means_have_fixed_values() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    x = torch.tensor([[1.0, 3.0, 99.0, 99.0], [1.0, 1.0, 1.0, 1.0]])
    totals = Totals(tokens=6, sequences=2)
    assert (seq_mean_token_mean(mask, totals) * x).sum().item() == pytest.approx((2.0 + 1.0) / 2)
    assert (seq_mean_token_sum_norm(mask, totals, horizon=8) * x).sum().item() == pytest.approx((4 / 8 + 4 / 8) / 2)


def test_a_loss_of_ones_own_is_taken_with_its_settings() -> None:
    name = "support.own_loss:negated"
    algorithms = make_algorithms(loss=name, settings={name: {"scale": 3.0}})
    x, _ = gradient(algorithms.loss, inputs([-2.0], [-2.0], [1.0]))
    assert x.item() == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        ({"loss": "ppo_clip"}, {}, "did you mean 'ppo-clip'"),
        ({"correction": "token-trunc"}, {}, "did you mean 'token-truncated'"),
        ({}, {"ppo-clip": {"clip_lo": 0.1}}, "did you mean 'clip_low'"),
        ({}, {"reinforce": {}}, "not used here"),
        ({"reduction": "seq-mean-token-sum-norm"}, {}, "horizon"),
        ({"loss": "no_such_package.losses:mine"}, {}, "no_such_package"),
    ],
)
def test_wrong_names_and_settings_are_refused_before_anything_runs(
    names: dict[str, Any], settings: dict[str, dict[str, float]], said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        make_algorithms(**names, settings=settings)
