"""Losses: `LossInputs, *, <settings> -> LossOutputs`, per token and before any reduction.

Pure functions: masks and weights arrive as inputs, denominators are the step's business.

| name | per-token loss x | source |
|---|---|---|
| ppo-clip | -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(l - lp) | arXiv 1707.06347, 2503.14476 |
| dual-clip | as ppo-clip, but never above -cap A where A < 0 | arXiv 1912.09729 |
| reinforce | -A l | Williams 1992 |
| gspo | as ppo-clip with s = exp(mean over the row of l - lp) in place of r | arXiv 2507.18071 |
| gspo-token | the same value; each token's gradient is weighed by its own A | arXiv 2507.18071 |
| gmpo | -mean(A) g, g = exp(mean over the row of the one-sidedly clipped l - lp) | arXiv 2507.20673 |
| cispo | -sg(clip(r, 1 - low, 1 + high)) A l | arXiv 2506.13585 |
| sapo | -A (4 / tau) sigmoid(tau (r - 1)) | arXiv 2511.20347 |
| dppo-tv | -sg(keep min(u, cap)) A l, u = exp(l - lmu); keep by abs(e^l - e^lmu) | arXiv 2602.04879 |
| dppo-kl | the same; keep by the KL of sampling this token or not | arXiv 2602.04879 |
| aipo | -sg(min(u, cap)) A l | arXiv 2505.24034 |
| supervised | -l | negative log-likelihood |

sg stops the gradient. `FITS` says which reduction each paper uses, which losses mean something else under another one,
and which weigh by exp(l - lmu) themselves, so that a correction would weigh twice.

A loss of whole rows (gspo, gmpo) gives the row's value to each of its tokens; the mean over the row, as in
seq-mean-token-mean, is then that value. A correction's weights multiply tokens, so such a row is weighed by their mean.

Shapes: B = rows, T = positions. Position t holds what belongs to token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainers.masked import masked, row_mean

LOSSES: Mapping[str, str] = {
    "aipo": "trainers.losses.aipo:aipo",
    "cispo": "trainers.losses.cispo:cispo",
    "dppo-kl": "trainers.losses.dppo_kl:dppo_kl",
    "dppo-tv": "trainers.losses.dppo_tv:dppo_tv",
    "dual-clip": "trainers.losses.dual_clip:dual_clip",
    "gmpo": "trainers.losses.gmpo:gmpo",
    "gspo": "trainers.losses.gspo:gspo",
    "gspo-token": "trainers.losses.gspo_token:gspo_token",
    "ppo-clip": "trainers.losses.ppo_clip:ppo_clip",
    "reinforce": "trainers.losses.reinforce:reinforce",
    "sapo": "trainers.losses.sapo:sapo",
    "supervised": "trainers.losses.supervised:supervised",
}


class Fit(NamedTuple):
    """What a loss goes together with."""

    reduction: str
    """The one of its paper."""
    only: bool = False
    """Whether another reduction would make it another algorithm."""
    corrects: bool = False
    """Whether x looks at l - lmu itself, or at no sampler at all, so that only the correction "none" is right."""
    advantages: bool = True
    """Whether x depends on advantages."""


FITS: Mapping[str, Fit] = {
    "aipo": Fit("token-mean", corrects=True),
    "cispo": Fit("token-mean"),
    "dppo-kl": Fit("token-mean", corrects=True),
    "dppo-tv": Fit("token-mean", corrects=True),
    "dual-clip": Fit("token-mean"),
    "gmpo": Fit("seq-mean-token-mean", only=True),
    "gspo": Fit("seq-mean-token-mean", only=True),
    "gspo-token": Fit("seq-mean-token-mean", only=True),
    "ppo-clip": Fit("token-mean"),
    "reinforce": Fit("token-mean"),
    "sapo": Fit("seq-mean-token-mean"),
    "supervised": Fit("token-mean", corrects=True, advantages=False),
}

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus and minus this before exp, which overflows float32 at 89."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss may look at. Values at places where `mask_BT` is False mean nothing and may be NaN or infinite."""

    logprobs_BT: Tensor
    """l: of the weights being trained; the only one with a gradient."""
    proximal_BT: Tensor
    """lp: of the trainer's weights when the batch was prepared."""
    behaviour_BT: Tensor
    """lmu: of the distribution really sampled from."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """bool: the trainable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """Per-token losses, exactly 0 where the mask is False, and per-token figures without gradient."""

    per_token_BT: Tensor
    figures_BT: Mapping[str, Tensor] = field(default_factory=dict)
    """Reported as means over the trainable tokens."""


Loss = Callable[[LossInputs], LossOutputs]


def difference(upper_BT: Tensor, lower_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """upper - lower; exactly 0, with gradient 0, where the mask is False.

    Both sides are replaced before they are subtracted: a NaN that is only multiplied by 0 stays a NaN.

    >>> mask = torch.tensor([True, False])
    >>> difference(torch.tensor([-1.0, -1.0]), torch.tensor([-100.0, float("nan")]), mask).tolist()
    [99.0, 0.0]
    """
    return masked(upper_BT, mask_BT) - masked(lower_BT, mask_BT)


def log_ratio(upper_BT: Tensor, lower_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """upper - lower, clamped to +-20; exactly 0, with gradient 0, where the mask is False.

    >>> mask = torch.tensor([True, True, False])
    >>> log_ratio(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -100.0, float("nan")]), mask).tolist()
    [0.5, 20.0, 0.0]
    """
    return difference(upper_BT, lower_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_ratio(inputs: LossInputs) -> Tensor:
    """s = exp(mean over the row of l - lp), as B x 1: the geometric mean of the row's ratios, its log clamped to +-20.

    The mean is clamped, not the tokens: one far token neither drops out of the gradient nor decides alone.
    """
    log_BT = difference(inputs.logprobs_BT, inputs.proximal_BT, inputs.mask_BT)
    return row_mean(log_BT, inputs.mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio_BT: Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """x = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), whatever the ratio r is of; with its figures."""
    mask_BT, advantages_BT = inputs.mask_BT, masked(inputs.advantages_BT, inputs.mask_BT)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    with torch.no_grad():
        figures = {
            "clipped_low": ((ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)).float(),
            "clipped_high": ((ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)).float(),
            "ratio": masked(ratio_BT.detach(), mask_BT),
        }
    return LossOutputs(per_token_BT=per_token_BT, figures_BT=figures)


def capped_policy_gradient(inputs: LossInputs, keep_BT: Tensor, *, cap: float) -> LossOutputs:
    """x = -sg(keep min(u, cap)) A l with u = exp(l - lmu), for the tokens that a rule of the caller keeps."""
    mask_BT = inputs.mask_BT
    ratio_BT = log_ratio(inputs.logprobs_BT, inputs.behaviour_BT, mask_BT).detach().exp()
    weight_BT = ratio_BT.clamp(max=cap) * keep_BT
    figures = {
        "stopped": (~keep_BT & mask_BT).float(),
        "capped": (keep_BT & mask_BT & (ratio_BT > cap)).float(),
        "ratio": masked(ratio_BT, mask_BT),
    }
    per_token_BT = -weight_BT * masked(inputs.advantages_BT, mask_BT) * masked(inputs.logprobs_BT, mask_BT)
    return LossOutputs(per_token_BT=per_token_BT, figures_BT=figures)
