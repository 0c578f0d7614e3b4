"""Losses, weights and returns are those of verl 0.9.1 and TRL 1.16.0, in value and gradient (frozen by tests/oracle/make_losses.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainers import corrections
from trainers.batch_corrections.batch_normalised import batch_normalised
from trainers.corrections import Correction, CorrectionInputs
from trainers.corrections.geometric_band import geometric_band
from trainers.corrections.icepop import icepop
from trainers.corrections.none import none
from trainers.corrections.opsm import opsm
from trainers.corrections.rejection import rejection
from trainers.corrections.sequence_truncated import sequence_truncated
from trainers.corrections.token_truncated import token_truncated
from trainers.entropy import entropies
from trainers.kl import kl_estimate
from trainers.losses import Loss, LossInputs, log_ratio
from trainers.losses.cispo import cispo
from trainers.losses.dppo_kl import dppo_kl
from trainers.losses.dppo_tv import dppo_tv
from trainers.losses.dual_clip import dual_clip
from trainers.losses.gmpo import gmpo
from trainers.losses.gspo import gspo
from trainers.losses.gspo_token import gspo_token
from trainers.losses.ppo_clip import ppo_clip
from trainers.losses.sapo import sapo
from trainers.normalise import Normaliser, NormaliserInputs, normalise
from trainers.normalise.gae import gae
from trainers.normalise.reinforce_plus_plus import reinforce_plus_plus
from trainers.normalise.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from trainers.normalise.whiten import whiten
from trainers.reductions import (
    Reduction,
    Totals,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from trainers.value_loss import value_loss

FROZEN = json.loads((Path(__file__).parent / "fixtures" / "losses.json").read_text("utf-8"))
BATCHES = FROZEN["batches"]
CAP = 1.5
bound = functools.partial
batches = pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
dr_grpo = bound(seq_mean_token_sum_norm, horizon=5)

OURS: dict[str, tuple[Loss, Correction, Reduction]] = {
    "verl vanilla token-mean": (ppo_clip, none, token_mean),
    "verl vanilla seq-mean-token-mean": (ppo_clip, none, seq_mean_token_mean),
    "verl vanilla seq-mean-token-sum": (ppo_clip, none, seq_mean_token_sum),
    "verl vanilla dual": (bound(dual_clip, cap=CAP), none, token_mean),
    "verl gspo": (bound(gspo_token, clip_low=0.05, clip_high=0.1), none, seq_mean_token_mean),
    "verl cispo": (bound(cispo, clip_low=0.2, clip_high=0.28), none, token_mean),
    "verl sapo": (sapo, none, seq_mean_token_mean),
    "verl dppo_tv": (bound(dppo_tv, limit_low=0.05, limit_high=0.1, cap=CAP), none, token_mean),
    "verl dppo_kl": (bound(dppo_kl, limit_low=0.01, limit_high=0.02, cap=CAP), none, token_mean),
    "verl geo_mean": (bound(gmpo, log_clip_low=0.2, log_clip_high=0.3), none, seq_mean_token_mean),
    "trl grpo": (ppo_clip, none, seq_mean_token_mean),
    "trl dr_grpo": (ppo_clip, none, dr_grpo),
    "trl dapo": (ppo_clip, none, token_mean),
    "trl dapo delta": (bound(dual_clip, cap=CAP), none, token_mean),
    "trl dapo importance": (ppo_clip, bound(token_truncated, cap=1.3), token_mean),
    "trl cispo": (bound(cispo, clip_low=1.0, clip_high=0.3), none, token_mean),  # TRL's 1.3 is the bound itself
    "trl sapo": (sapo, none, seq_mean_token_mean),
    "trl gspo": (bound(gspo, clip_low=0.2, clip_high=0.05), none, seq_mean_token_mean),
}
ELSEWHERE = {"verl value", "verl entropy", "trl dapo k3", "trl dapo k3 corrected", "trl grpo opsm"}
"""Answers that have a test of their own below."""


IN_FLOAT32 = {"trl sapo"}
"""TRL makes its temperatures float32."""


def column(batch: dict[str, Any], name: str) -> Tensor:
    return torch.tensor(batch[name], dtype=torch.float64)


def inputs(batch: dict[str, Any]) -> LossInputs:
    return LossInputs(
        logprobs_BT=column(batch, "logprobs").requires_grad_(),
        proximal_BT=column(batch, "proximal"),
        behaviour_BT=column(batch, "behaviour"),
        advantages_BT=column(batch, "advantages"),
        mask_BT=column(batch, "mask").bool(),
    )


def weigh(batch: dict[str, Any], *, at: str = "proximal") -> CorrectionInputs:
    mask = column(batch, "mask").bool()
    return CorrectionInputs(
        log_weight_BT=log_ratio(column(batch, at), column(batch, "behaviour"), mask),
        mask_BT=mask,
        behaviour_BT=column(batch, "behaviour"),
        advantages_BT=column(batch, "advantages"),
    )


def reduced(per_token_BT: Tensor, mask_BT: Tensor, reduction: Reduction) -> Tensor:
    totals = Totals(int(mask_BT.sum()), int(mask_BT.any(dim=1).sum()))
    return (reduction(mask_BT.double(), totals).double() * per_token_BT).sum()


def same(value: Tensor, at: Tensor, theirs: dict[str, Any], *, close: float = 1e-7) -> None:
    """In float64, but for the coefficients of reductions, which are float32; verl adds 1e-8 to lengths of rows."""
    (slope,) = torch.autograd.grad(value, at)
    torch.testing.assert_close(value.item(), theirs["value"], rtol=close, atol=close / 10)
    torch.testing.assert_close(
        slope, torch.tensor(theirs["gradient"], dtype=torch.float64), rtol=close, atol=close / 10
    )


CASES = [(i, name) for i, batch in enumerate(BATCHES) for name in sorted(batch["losses"]) if name not in ELSEWHERE]


@pytest.mark.parametrize(("number", "name"), CASES)
def test_losses_are_theirs_in_value_and_gradient(number: int, name: str) -> None:
    batch, (loss, correction, reduction) = BATCHES[number], OURS[name]
    given = inputs(batch)
    weights = correction(weigh(batch)).weights_BT
    value = reduced(loss(given).per_token_BT * weights, given.mask_BT, reduction)
    same(value, given.logprobs_BT, batch["losses"][name], close=1e-6 if name in IN_FLOAT32 else 1e-7)


def test_every_answer_is_looked_at() -> None:
    answers = {name for batch in BATCHES for name in batch["losses"]}
    assert answers == OURS.keys() | ELSEWHERE


@batches
@pytest.mark.parametrize(("name", "corrected"), [("trl dapo k3", False), ("trl dapo k3 corrected", True)])
def test_kl_in_the_loss_is_trls(batch: dict[str, Any], name: str, corrected: bool) -> None:
    given = inputs(batch)
    ratio = log_ratio(given.logprobs_BT, given.proximal_BT, given.mask_BT).exp()
    kl = kl_estimate(
        given.logprobs_BT,
        column(batch, "reference"),
        given.mask_BT,
        estimator="k3",
        ratio_BT=ratio if corrected else None,
    )
    value = reduced(ppo_clip(given).per_token_BT + 0.1 * kl, given.mask_BT, token_mean)
    same(value, given.logprobs_BT, batch["losses"][name])


@batches
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_kl_estimates_are_verls(batch: dict[str, Any], estimator: str) -> None:
    given = inputs(batch)
    kl = kl_estimate(given.logprobs_BT, column(batch, "reference"), given.mask_BT, estimator=estimator)
    same(kl.sum(), given.logprobs_BT, batch["kl"][estimator])


@pytest.mark.parametrize("batch", [batch for batch in BATCHES if batch["even"]])
def test_opsm_is_trls(batch: dict[str, Any]) -> None:
    """TRL looks at the weights being trained where ours looks at those of the step's beginning."""
    given = inputs(batch)
    weights = opsm(weigh(batch, at="logprobs"), limit=0.02).weights_BT
    assert 0 < weights.sum() < weights.numel()
    value = reduced(ppo_clip(given).per_token_BT * weights, given.mask_BT, seq_mean_token_mean)
    same(value, given.logprobs_BT, batch["losses"]["trl grpo opsm"])


@batches
def test_value_loss_and_entropy_are_verls(batch: dict[str, Any]) -> None:
    values, mask = column(batch, "values").requires_grad_(), column(batch, "mask").bool()
    out = value_loss(values, column(batch, "old_values"), column(batch, "returns"), mask, clip=0.2)
    same(reduced(out.per_token_BT, mask, token_mean), values, batch["losses"]["verl value"])
    logits = column(batch, "logits").requires_grad_()
    same(entropies(logits).sum(), logits, batch["losses"]["verl entropy"])


WEIGHTS: dict[str, Correction] = {
    "token": bound(token_truncated, cap=1.3),
    "sequence": bound(sequence_truncated, cap=1.3),
    "icepop": bound(icepop, low=0.8, high=1.3),
    "token normalised": bound(batch_normalised, cap=1.3),
    "sequence normalised": bound(batch_normalised, cap=1.3, level="row"),
}
REJECTIONS: dict[str, Correction] = {
    "seq_mean_k1": bound(geometric_band, low=0.95, high=1.1),
    **{
        f"{theirs}_{k}": bound(rejection, estimator=k, level=level, limit=limit)
        for k in ("k2", "k3")
        for theirs, level, limit in (
            ("token", "token", 0.05),
            ("seq_mean", "row-mean", 0.05),
            ("seq_max", "row-max", 0.1),
            ("seq_sum", "row-sum", 0.2),
        )
    },
}


@batches
@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_weights_are_verls(batch: dict[str, Any], name: str) -> None:
    given = weigh(batch)
    ours = WEIGHTS[name](given).weights_BT * given.mask_BT
    torch.testing.assert_close(ours, torch.tensor(batch["weights"][name], dtype=torch.float64), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", sorted(REJECTIONS))
def test_rejections_are_verls(name: str) -> None:
    seen = set()
    for batch in BATCHES:
        given = weigh(batch)
        kept = (REJECTIONS[name](given).weights_BT > 0) & given.mask_BT
        theirs = torch.tensor(batch["weights"][name]).bool()
        assert torch.equal(kept, theirs)
        seen |= {bool(theirs[given.mask_BT].all()), bool(theirs.any())}
    assert seen == {False, True}  # neither all kept everywhere nor none


def test_every_weight_is_looked_at() -> None:
    assert all(batch["weights"].keys() == WEIGHTS.keys() | REJECTIONS.keys() for batch in BATCHES)


STEPS: dict[str, tuple[Sequence[Normaliser], Callable[[Any], Tensor]]] = {
    "whiten": ([whiten], lambda out: out.advantages_BT),
    "gae whitened": ([bound(gae, gamma=0.97, lam=0.9), whiten], lambda out: out.advantages_BT),
    "gae returns": ([bound(gae, gamma=0.97, lam=0.9)], lambda out: out.returns_BT),
    "reinforce++": ([bound(reinforce_plus_plus, gamma=0.97)], lambda out: out.advantages_BT),
    "reinforce++ returns": ([bound(reinforce_plus_plus, gamma=0.97)], lambda out: out.returns_BT),
    "reinforce++ baseline": ([reinforce_plus_plus_baseline], lambda out: out.advantages_BT),
}


@batches
@pytest.mark.parametrize("name", sorted(STEPS))
def test_what_is_normalised_over_a_step_is_verls(batch: dict[str, Any], name: str) -> None:
    mask = column(batch, "mask").bool()
    rewards = column(batch, "rewards")
    given = NormaliserInputs(
        advantages_BT=column(batch, "advantages"),
        mask_BT=mask,
        rewards_B=(rewards * mask).sum(dim=1),
        rewards_BT=rewards,
        groups=batch["groups"],
        values_BT=column(batch, "values"),
    )
    assert batch["steps"].keys() == STEPS.keys()
    chain, of = STEPS[name]
    theirs = torch.tensor(batch["steps"][name], dtype=torch.float64)
    torch.testing.assert_close(of(normalise(chain, given)), theirs, rtol=1e-8, atol=1e-8)


def test_the_batches_reach_every_branch() -> None:
    """Clips on both sides, caps, stops and rejections do happen in what is compared."""
    figures: dict[str, float] = {}
    for batch in BATCHES:
        for name, (loss, correction, _) in OURS.items():
            found = {**loss(inputs(batch)).figures_BT, **correction(weigh(batch)).figures_BT}
            for figure, value in found.items():
                figures[f"{name}: {figure}"] = figures.get(f"{name}: {figure}", 0.0) + value.sum().item()
    never = {name for name, total in figures.items() if total == 0}
    assert never == {"trl cispo: clipped_low"}, never  # it has no lower bound
    assert corrections.product([])(weigh(BATCHES[0])).weights_BT.eq(1).all()
