"""What holds for every loss of the table: its formula in value and gradient, masks, padding, splits, extremes, refused settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from schemas.components import load
from schemas.errors import SettingError
from trainers.corrections import CorrectionInputs
from trainers.corrections.token_truncated import token_truncated
from trainers.losses import FITS, LOSSES, Loss, LossInputs, log_ratio
from trainers.losses.gspo import gspo
from trainers.reductions import REDUCTIONS, Reduction, Totals, seq_mean_token_mean, seq_mean_token_sum, token_mean

Row = NDArray[np.float64]
BY_NAME: dict[str, Loss] = {name: load("loss", name, LOSSES) for name in sorted(LOSSES)}
each = pytest.mark.parametrize("name", sorted(BY_NAME))
seeds = st.integers(0, 10_000)
few = settings(max_examples=20, deadline=None)
WHOLE_ROW = ["gmpo", "gspo"]


# Slow twins ---------------------------------------------------------------------------------------------------------
# Of one row's trainable tokens. `l` stands where the formula has a gradient, `sg` (equal in value) where it is stopped.


def _ppo(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def _ratios(l: Row, lp: Row) -> list[float]:  # noqa: E741
    return [math.exp(x - y) for x, y in zip(l, lp, strict=True)]


def _binary_kl(q: float, p: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))


def _keeps_tv(p: float, q: float, a: float) -> bool:
    return p - q <= 0.2 if a > 0 else p - q >= -0.2


def _keeps_kl(p: float, q: float, a: float) -> bool:
    return _binary_kl(q, p) <= 0.05 or (p <= q if a > 0 else p >= q)


def twin(name: str, l: Row, sg: Row, lp: Row, lmu: Row, a: Row) -> list[float]:  # noqa: E741
    """x of each token of the row."""
    r, u, n = _ratios(l, lp), _ratios(sg, lmu), len(l)

    def row(values: Sequence[float]) -> float:
        return math.fsum(values) / n

    def dppo(keeps: Callable[[float, float, float], bool]) -> list[float]:
        kept = [keeps(math.exp(x), math.exp(y), b) for x, y, b in zip(sg, lmu, a, strict=True)]
        return [-min(u[i], 20.0) * a[i] * l[i] * kept[i] for i in range(n)]

    def gmpo() -> list[float]:
        stopped = [
            0.0 if b == 0 else min(x - y, 0.4) if b > 0 else max(x - y, -0.4) for x, y, b in zip(l, lp, a, strict=True)
        ]
        return [-row(list(a)) * math.exp(row(stopped))] * n

    def dual() -> list[float]:
        return [min(x, -3.0 * b) if b < 0 else x for x, b in zip(ppo(r, 0.2, 0.28), a, strict=True)]

    def ppo(ratios: Sequence[float], low: float, high: float) -> list[float]:
        return [_ppo(x, b, low, high) for x, b in zip(ratios, a, strict=True)]

    def sapo() -> list[float]:
        tau = [1.0 if b > 0 else 1.05 for b in a]
        return [-b * 4 / t / (1 + math.exp(-t * (x - 1))) for x, b, t in zip(r, a, tau, strict=True)]

    s, s_stopped = math.exp(row(list(l - lp))), math.exp(row(list(sg - lp)))
    formulae: dict[str, Callable[[], list[float]]] = {
        "aipo": lambda: [-min(u[i], 4.0) * a[i] * l[i] for i in range(n)],
        "cispo": lambda: [-min(math.exp(sg[i] - lp[i]), 5.0) * a[i] * l[i] for i in range(n)],
        "dppo-kl": lambda: dppo(_keeps_kl),
        "dppo-tv": lambda: dppo(_keeps_tv),
        "dual-clip": dual,
        "gmpo": gmpo,
        "gspo": lambda: ppo([s] * n, 3e-4, 4e-4),
        "gspo-token": lambda: ppo([s_stopped * math.exp(l[i] - sg[i]) for i in range(n)], 3e-4, 4e-4),
        "ppo-clip": lambda: ppo(r, 0.2, 0.28),
        "reinforce": lambda: [-a[i] * l[i] for i in range(n)],
        "sapo": sapo,
        "supervised": lambda: [-x for x in l],
    }
    return formulae[name]()


def slopes(name: str, l: Row, *rest: Row) -> Row:  # noqa: E741
    """d(sum of x)/dl by central differences; what is stopped stays where it is."""
    found = np.zeros(len(l))
    for i in range(len(l)):
        step = np.zeros(len(l))
        step[i] = 1e-6
        up, down = (math.fsum(twin(name, l + side * step, l, *rest)) for side in (1, -1))
        found[i] = (up - down) / 2e-6
    return found


# Batches ------------------------------------------------------------------------------------------------------------


def batch(seed: int, *, rows: int = 4, width: int = 6, even: bool = False) -> LossInputs:
    """Rows with holes, some without any trainable token; some advantages 0; `even`: a row's advantages are all equal."""
    rng = np.random.default_rng(seed)
    proximal = -rng.uniform(0.05, 2.5, (rows, width))
    logprobs = np.minimum(proximal + rng.normal(0, 0.5, (rows, width)), -1e-3)
    behaviour = np.minimum(proximal + rng.normal(0, 0.5, (rows, width)), -1e-3)
    advantages = rng.normal(0, 1, (rows, 1 if even else width)) * np.ones((rows, width))
    if not even:
        advantages[rng.random((rows, width)) < 0.1] = 0.0
    mask = rng.random((rows, width)) < 0.7
    mask[rng.integers(rows)] = rng.random() < 0.5
    return LossInputs(
        logprobs_BT=torch.tensor(logprobs, requires_grad=True),
        proximal_BT=torch.tensor(proximal),
        behaviour_BT=torch.tensor(behaviour),
        advantages_BT=torch.tensor(advantages),
        mask_BT=torch.tensor(mask),
    )


def columns(inputs: LossInputs) -> dict[str, Tensor]:
    return {f.name: getattr(inputs, f.name).detach() for f in dataclasses.fields(inputs)}


def of(tensors: dict[str, Tensor]) -> LossInputs:
    return LossInputs(**{**tensors, "logprobs_BT": tensors["logprobs_BT"].clone().requires_grad_()})


def graded(loss: Loss, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """x, and the gradient of its sum."""
    per_token_BT = loss(inputs).per_token_BT
    (slope_BT,) = torch.autograd.grad(per_token_BT.sum(), inputs.logprobs_BT)
    return per_token_BT.detach(), slope_BT


# Tests --------------------------------------------------------------------------------------------------------------


def test_every_loss_says_what_it_goes_with() -> None:
    assert FITS.keys() == LOSSES.keys()
    assert {fit.reduction for fit in FITS.values()} <= REDUCTIONS.keys()


@each
@pytest.mark.parametrize("seed", range(12))
def test_equals_its_formula_in_value_and_gradient(name: str, seed: int) -> None:
    inputs = batch(seed)
    x_BT, slope_BT = graded(BY_NAME[name], inputs)
    for i, mask_T in enumerate(inputs.mask_BT.numpy()):
        if not mask_T.any():
            continue
        own, lp, lmu, a = (
            tensor[i].detach().numpy()[mask_T]
            for tensor in (inputs.logprobs_BT, inputs.proximal_BT, inputs.behaviour_BT, inputs.advantages_BT)
        )
        np.testing.assert_allclose(x_BT[i].numpy()[mask_T], twin(name, own, own, lp, lmu, a), rtol=1e-9)
        np.testing.assert_allclose(slope_BT[i].numpy()[mask_T], slopes(name, own, lp, lmu, a), rtol=1e-5, atol=1e-7)


@each
@few
@given(seed=seeds, poison=st.sampled_from([math.nan, math.inf, -math.inf, -1e30, -100.0]))
def test_what_is_masked_contributes_exactly_nothing(name: str, seed: int, poison: float) -> None:
    clean = batch(seed)
    x_BT, slope_BT = graded(BY_NAME[name], clean)
    poisoned = {
        column: value if column == "mask_BT" else torch.where(clean.mask_BT, value, poison)
        for column, value in columns(clean).items()
    }
    out = BY_NAME[name](of(poisoned))
    found_x, found_slope = graded(BY_NAME[name], of(poisoned))
    assert torch.equal(found_x, x_BT) and torch.equal(found_slope, slope_BT)
    assert not found_x[~clean.mask_BT].any() and not found_slope[~clean.mask_BT].any()
    assert all(torch.isfinite(figure[clean.mask_BT]).all() for figure in out.figures_BT.values())
    assert not any(figure.requires_grad for figure in out.figures_BT.values())


@each
@few
@given(seed=seeds, right=st.integers(0, 5), below=st.integers(0, 2))
def test_padding_changes_nothing(name: str, seed: int, right: int, below: int) -> None:
    inputs = batch(seed)
    x_BT, slope_BT = graded(BY_NAME[name], inputs)
    wide = {c: torch.nn.functional.pad(v, (0, right, 0, below)) for c, v in columns(inputs).items()}
    found_x, found_slope = graded(BY_NAME[name], of(wide))
    torch.testing.assert_close(found_x[:4, :6], x_BT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_slope[:4, :6], slope_BT, rtol=1e-12, atol=1e-12)
    assert not found_x[4:].any() and not found_x[:, 6:].any()


@each
@few
@given(
    seed=seeds, cut=st.integers(1, 3), reduction=st.sampled_from([token_mean, seq_mean_token_mean, seq_mean_token_sum])
)
def test_splits_into_micro_batches_sum_to_the_whole(name: str, seed: int, cut: int, reduction: Reduction) -> None:
    inputs = batch(seed)
    totals = Totals(int(inputs.mask_BT.sum()), int(inputs.mask_BT.any(dim=1).sum()))

    def value(part: LossInputs) -> tuple[Tensor, Tensor]:
        total = (reduction(part.mask_BT, totals) * BY_NAME[name](part).per_token_BT).sum()
        return total.detach(), torch.autograd.grad(total, part.logprobs_BT)[0]

    whole, slope_BT = value(inputs)
    parts = [value(of({c: v[rows] for c, v in columns(inputs).items()})) for rows in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(x for x, _ in parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([slope for _, slope in parts]), slope_BT, rtol=1e-12, atol=1e-12)


@each
def test_extremes_stay_finite(name: str) -> None:
    """In float32: certain and impossible tokens, far apart, with large advantages of either sign."""
    values = [0.0, -1e-7, -1.0, -50.0, -1e4, -1e30]
    grid = torch.tensor([(x, y, z) for x in values for y in values for z in values])
    for size in (1e3, -1e3, 0.0):
        inputs = of(
            {
                "logprobs_BT": grid[:, :1].expand(-1, 2), "proximal_BT": grid[:, 1:2].expand(-1, 2),
                "behaviour_BT": grid[:, 2:].expand(-1, 2), "advantages_BT": torch.full((len(grid), 2), size),
                "mask_BT": torch.ones(len(grid), 2, dtype=torch.bool),
            }
        )  # fmt: skip
        bounded = inputs.logprobs_BT[:, 0] > -1e20  # -A l of an impossible token is as large as l itself
        x_BT, slope_BT = graded(BY_NAME[name], inputs)
        assert torch.isfinite(x_BT[bounded]).all() and torch.isfinite(slope_BT).all()


@each
@few
@given(seed=seeds)
def test_on_policy_the_gradient_is_that_of_reinforce(name: str, seed: int) -> None:
    """All of them are policy gradients where nothing has moved; supervised is one of advantage 1."""
    tensors = columns(batch(seed, even=True))
    tensors |= {"proximal_BT": tensors["logprobs_BT"], "behaviour_BT": tensors["logprobs_BT"]}
    if not FITS[name].advantages:
        tensors["advantages_BT"] = torch.ones_like(tensors["advantages_BT"])
    _, slope_BT = graded(BY_NAME[name], of(tensors))
    _, plain_BT = graded(BY_NAME["reinforce"], of(tensors))
    torch.testing.assert_close(slope_BT, plain_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE_ROW)
@few
@given(seed=seeds)
def test_losses_of_whole_rows_give_the_papers_value_under_their_reduction(name: str, seed: int) -> None:
    inputs = batch(seed)
    x_BT = BY_NAME[name](inputs).per_token_BT.detach()
    used = [i for i, mask_T in enumerate(inputs.mask_BT) if mask_T.any()]
    paper = [x_BT[i][inputs.mask_BT[i]].mean().item() for i in used]
    value = (seq_mean_token_mean(inputs.mask_BT, Totals(0, len(used))) * x_BT).sum().item()
    assert value == pytest.approx(sum(paper) / max(len(paper), 1), rel=1e-6, abs=1e-7)
    if name == "gmpo":
        assert all(len(set(x_BT[i][inputs.mask_BT[i]].tolist())) == 1 for i in used)


@few
@given(seed=seeds)
def test_both_forms_of_gspo_agree_where_a_rows_advantages_are_equal(seed: int) -> None:
    inputs = batch(seed, even=True)
    for found, other in zip(graded(BY_NAME["gspo"], inputs), graded(BY_NAME["gspo-token"], inputs), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-12)


@few
@given(seed=seeds)
def test_aipo_is_truncated_reinforce_when_there_is_one_update(seed: int) -> None:
    tensors = columns(batch(seed))
    inputs = of({**tensors, "proximal_BT": tensors["logprobs_BT"]})
    log_weight_BT = log_ratio(tensors["logprobs_BT"], tensors["behaviour_BT"], inputs.mask_BT)
    weights_BT = token_truncated(CorrectionInputs(log_weight_BT=log_weight_BT, mask_BT=inputs.mask_BT), cap=4.0)
    x_BT, slope_BT = graded(BY_NAME["aipo"], inputs)
    plain_x, plain_slope = graded(BY_NAME["reinforce"], inputs)
    torch.testing.assert_close(x_BT, plain_x * weights_BT.weights_BT)
    torch.testing.assert_close(slope_BT, plain_slope * weights_BT.weights_BT)


def test_one_far_token_neither_leaves_gspos_gradient_nor_takes_it_over() -> None:
    """Clamping each token's log ratio instead of the mean would give the far one slope 0."""
    inputs = of(
        {
            "logprobs_BT": torch.tensor([[-1.0, -30.0]]), "proximal_BT": torch.tensor([[-1.0, -1.0]]),
            "behaviour_BT": torch.zeros(1, 2), "advantages_BT": torch.ones(1, 2),
            "mask_BT": torch.ones(1, 2, dtype=torch.bool),
        }
    )  # fmt: skip
    _, slope_BT = graded(functools.partial(gspo, clip_low=1.0, clip_high=1.0), inputs)
    assert slope_BT[0, 0].item() == slope_BT[0, 1].item() == pytest.approx(-math.exp(-14.5), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ppo-clip", {"clip_low": 1.5}, "clip_low is 1.5; it must be from 0 to 1"),
        ("ppo-clip", {"clip_high": -0.1}, "clip_high is -0.1"),
        ("dual-clip", {"cap": 1.28}, "cap is 1.28; it must be greater than 1.28"),
        ("dual-clip", {"cap": math.nan}, "cap is nan"),
        ("gspo", {"clip_low": -1e-4}, "gspo: clip_low"),
        ("gspo-token", {"clip_high": math.nan}, "gspo-token: clip_high"),
        ("gmpo", {"log_clip_low": -0.4}, "log_clip_low is -0.4; it must be 0 or more"),
        ("gmpo", {"log_clip_high": math.nan}, "log_clip_high"),
        ("cispo", {"clip_low": 2.0}, "cispo: clip_low"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive is 0.0; it must be greater than 0"),
        ("sapo", {"tau_negative": -1.0}, "tau_negative"),
        ("dppo-tv", {"limit_low": -0.2}, "dppo-tv: limit_low"),
        ("dppo-tv", {"limit_high": math.nan}, "dppo-tv: limit_high"),
        ("dppo-tv", {"cap": 0.0}, "dppo-tv: cap"),
        ("dppo-kl", {"limit_low": -0.2}, "dppo-kl: limit_low"),
        ("dppo-kl", {"limit_high": -0.2}, "dppo-kl: limit_high"),
        ("dppo-kl", {"cap": -1.0}, "dppo-kl: cap"),
        ("aipo", {"cap": 0.0}, "aipo: cap is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        functools.partial(BY_NAME[name], **settings)(batch(0))
