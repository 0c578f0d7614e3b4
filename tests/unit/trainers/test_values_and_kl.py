"""Estimates along a row and of distances: returns, GAE, value loss, KL, entropy; against slow twins and by what they must satisfy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.errors import SettingError
from trainers.entropy import entropies, entropy_bonus
from trainers.gae import gae, returns_to_go, rewards_at_end
from trainers.kl import ESTIMATORS, kl_estimate
from trainers.masked import discounted_sums, packed, unpacked
from trainers.value_loss import value_loss

few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 10_000)
shares = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def draw(seed: int, *, rows: int = 3, width: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, mask with holes, values after the end."""
    rng = np.random.default_rng(seed)
    mask = torch.tensor(rng.random((rows, width)) < rng.choice([0.3, 0.8]))
    return (
        torch.tensor(rng.normal(0, 1, (rows, width))),
        torch.tensor(rng.normal(0, 1, (rows, width))),
        mask,
        torch.tensor(rng.normal(0, 1, rows)),
    )


@few
@given(seed=seeds, gamma=shares, lam=shares, bootstrap=st.booleans())
def test_gae_and_returns_equal_their_recursions(seed: int, gamma: float, lam: float, bootstrap: bool) -> None:
    rewards, values, mask, ends = draw(seed)
    found = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_B=ends if bootstrap else None)
    to_go = returns_to_go(rewards, mask, gamma=gamma)
    for i in range(len(mask)):
        advantage, after, total = 0.0, float(ends[i]) if bootstrap else 0.0, 0.0
        for t in reversed(range(mask.shape[1])):
            if not mask[i, t]:
                assert found.advantages_BT[i, t] == found.returns_BT[i, t] == to_go[i, t] == 0
                continue
            r, v = float(rewards[i, t]), float(values[i, t])
            advantage = r + gamma * after - v + gamma * lam * advantage
            after, total = v, r + gamma * total
            assert found.advantages_BT[i, t].item() == pytest.approx(advantage, abs=1e-12)
            assert found.returns_BT[i, t].item() == pytest.approx(advantage + v, abs=1e-12)
            assert to_go[i, t].item() == pytest.approx(total, abs=1e-12)


@few
@given(seed=seeds, right=st.integers(0, 5), poison=st.sampled_from([math.nan, math.inf, 1e30]))
def test_neither_padding_nor_masked_places_reach_gae(seed: int, right: int, poison: float) -> None:
    rewards, values, mask, ends = draw(seed)
    wide_mask = torch.nn.functional.pad(mask, (0, right))
    wide_rewards, wide_values = (
        torch.where(wide_mask, torch.nn.functional.pad(x, (0, right)), poison) for x in (rewards, values)
    )
    found = gae(wide_rewards, wide_values, wide_mask, bootstrap_B=ends)
    expected = gae(rewards, values, mask, bootstrap_B=ends)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, : mask.shape[1]], theirs, rtol=1e-12, atol=1e-12)
        assert not ours[:, mask.shape[1] :].any()


def test_a_row_that_was_cut_off_is_worth_what_was_still_to_come() -> None:
    """Value 0.8 throughout and no reward yet: nothing was learnt, unless one forgets that the row would have gone on."""
    values, mask = torch.full((2, 3), 0.8), torch.ones(2, 3, dtype=torch.bool)
    found = gae(torch.zeros(2, 3), values, mask, lam=1.0, bootstrap_B=torch.tensor([0.8, 0.0]))
    assert found.advantages_BT[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)
    assert found.advantages_BT[1].tolist() == pytest.approx([-0.8, -0.8, -0.8])


def test_a_rows_reward_stands_on_its_last_trainable_token() -> None:
    mask = torch.tensor([[True, True, False, False, True], [True, False, False, False, False], [False] * 5])
    found = rewards_at_end(torch.tensor([3.0, 2.0, 7.0]), mask)
    assert found.tolist() == [[0, 0, 0, 0, 3], [2, 0, 0, 0, 0], [0] * 5]


@few
@given(seed=seeds)
def test_packing_is_undone_by_unpacking(seed: int) -> None:
    rewards, _, mask, _ = draw(seed)
    tight = packed(rewards, mask)
    assert tight.shape[1] == int(mask.sum(dim=1).max())
    assert torch.equal(unpacked(tight, mask), torch.where(mask, rewards, 0.0))


@pytest.mark.parametrize("width", [0, 1, 2, 3, 7, 8, 9, 33])
@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_discounted_sums_of_any_width(width: int, discount: float) -> None:
    values = torch.arange(1.0, width + 1, dtype=torch.float64)[None]
    expected, total = [], 0.0
    for value in reversed(values[0].tolist()):
        total = value + discount * total
        expected.append(total)
    assert discounted_sums(values, discount)[0].tolist() == pytest.approx(expected[::-1])


@few
@given(value=st.floats(-3, 3), old=st.floats(-3, 3), target=st.floats(-3, 3), clip=st.floats(0.01, 2))
def test_value_loss_is_its_formula_in_value_and_gradient(value: float, old: float, target: float, clip: float) -> None:
    leaf = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    old_BT, target_BT = torch.tensor([[old]], dtype=torch.float64), torch.tensor([[target]], dtype=torch.float64)
    x = value_loss(leaf, old_BT, target_BT, mask, clip=clip).per_token_BT
    near = min(max(value, old - clip), old + clip)
    assert x.item() == pytest.approx(max((value - target) ** 2, (near - target) ** 2) / 2, abs=1e-12)
    (slope,) = torch.autograd.grad(x.sum(), leaf)
    plain, clipped = (value - target) ** 2, (near - target) ** 2
    if abs(plain - clipped) > 1e-9:
        assert slope.item() == pytest.approx(value - target if plain > clipped else 0.0, abs=1e-9)


def test_masked_values_add_nothing_to_the_value_loss() -> None:
    leaf = torch.tensor([[1.0, math.nan]], requires_grad=True)
    nan = torch.tensor([[0.0, math.nan]])
    out = value_loss(leaf, nan, nan, torch.tensor([[True, False]]), clip=math.inf)
    (slope,) = torch.autograd.grad(out.per_token_BT.sum(), leaf)
    assert out.per_token_BT.tolist() == [[0.5, 0.0]] and slope.tolist() == [[1.0, 0.0]]
    with pytest.raises(SettingError, match="value_loss: clip is 0"):
        value_loss(leaf, nan, nan, torch.tensor([[True, False]]), clip=0.0)


# KL -----------------------------------------------------------------------------------------------------------------


def kl_of(logits: Tensor, reference: Tensor) -> Tensor:
    policy, other = logits.log_softmax(-1), reference.log_softmax(-1)
    return (policy.exp() * (policy - other)).sum()


def expected_estimate(logits: Tensor, reference: Tensor, name: str, *, ratio: bool = False) -> tuple[float, Tensor]:
    """Mean over what the policy would sample of the estimate, and of its gradient."""
    policy, other = logits.log_softmax(-1), reference.log_softmax(-1)
    mask = torch.ones_like(logits, dtype=torch.bool)[None]
    weight = (policy - policy.detach()).exp()[None] if ratio else None
    estimate = kl_estimate(policy[None], other[None], mask, estimator=name, ratio_BT=weight)
    mean = (policy.detach().exp() * estimate).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


@few
@given(seed=seeds)
def test_kl_estimates_are_unbiased_in_value_or_gradient_as_their_table_says(seed: int) -> None:
    """Over all tokens of a small vocabulary, so exactly and not by sampling; near enough for k3 not to reach its cap."""
    rng = torch.Generator().manual_seed(seed)
    logits = (0.6 * torch.randn(6, generator=rng, dtype=torch.float64).tanh()).requires_grad_()
    reference = 0.6 * torch.randn(6, generator=rng, dtype=torch.float64).tanh()
    kl = kl_of(logits, reference)
    (slope,) = torch.autograd.grad(kl, logits)
    forward = kl_of(reference, logits)
    (backwards_slope,) = torch.autograd.grad(forward, logits)
    for name in ("k1", "k3", "k3+"):
        assert expected_estimate(logits, reference, name)[0] == pytest.approx(kl.item(), abs=1e-9)
    for name in ("k2", "k3+"):
        torch.testing.assert_close(expected_estimate(logits, reference, name)[1], slope, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        expected_estimate(logits, reference, "k1")[1], torch.zeros(6).double(), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(expected_estimate(logits, reference, "k3")[1], backwards_slope, rtol=1e-7, atol=1e-9)
    corrected = expected_estimate(logits, reference, "k3", ratio=True)
    assert corrected[0] == pytest.approx(kl.item(), abs=1e-9)
    torch.testing.assert_close(corrected[1], slope, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_kl_at_masked_places_is_nothing_and_extremes_are_bounded(name: str, poison: float) -> None:
    own = torch.tensor([[-1.0, poison, -1e4, 0.0]], requires_grad=True)
    other = torch.tensor([[-1.5, poison, 0.0, -1e4]])
    ratio = torch.tensor([[1.0, poison, 1.0, 1.0]])
    found = kl_estimate(own, other, torch.tensor([[True, False, True, True]]), estimator=name, ratio_BT=ratio)
    (slope,) = torch.autograd.grad(found.sum(), own)
    assert found[0, 1] == 0 and slope[0, 1] == 0
    assert torch.isfinite(found).all() and torch.isfinite(slope).all() and found.abs().max() <= 200


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(SettingError, match="kl: estimator is 'k4'; did you mean 'k"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), estimator="k4")


# Entropy ------------------------------------------------------------------------------------------------------------


@few
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8))
def test_entropy_is_its_formula(logits: list[float]) -> None:
    tensor = torch.tensor(logits, dtype=torch.float64)
    p = tensor.softmax(-1).tolist()
    expected = -math.fsum(x * math.log(x) for x in p if x > 0)
    assert entropies(tensor).item() == pytest.approx(expected, abs=1e-9)


def test_entropy_does_without_forbidden_tokens() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0], requires_grad=True)
    (slope,) = torch.autograd.grad(entropies(logits), logits)
    assert entropies(logits).item() == pytest.approx(math.log(2))
    assert torch.isfinite(slope).all()


def test_the_bonus_raises_entropy_and_spares_masked_places() -> None:
    logits = torch.tensor([[[1.0, 0.0], [math.nan, 0.0]]], requires_grad=True)
    bonus = entropy_bonus(entropies(logits), torch.tensor([[True, False]]), 0.5)
    assert bonus[0, 1] == 0 and bonus[0, 0].item() == pytest.approx(-0.5 * 0.5822, abs=1e-4)
