"""Losses: `LossInputs, *, <settings> -> LossOutputs`, per token and before any reduction.

Pure functions: masks and weights arrive as inputs, denominators are the step's business.

| name | per-token loss x | source |
|---|---|---|
| ppo-clip | -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(l - lp) | arXiv 1707.06347, 2503.14476 |
| reinforce | -A l | Williams 1992 |

Shapes: B = rows, T = positions. Position t holds what belongs to token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOSSES: Mapping[str, str] = {
    "ppo-clip": "trainers.losses.ppo_clip:ppo_clip",
    "reinforce": "trainers.losses.reinforce:reinforce",
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


def log_ratio(upper_BT: Tensor, lower_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """upper - lower, clamped to +-20; exactly 0, with gradient 0, where the mask is False.

    Both sides are replaced before they are subtracted: a NaN that is only multiplied by 0 stays a NaN.

    >>> mask = torch.tensor([True, True, False])
    >>> log_ratio(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -100.0, float("nan")]), mask).tolist()
    [0.5, 20.0, 0.0]
    """
    difference = torch.where(mask_BT, upper_BT, 0.0) - torch.where(mask_BT, lower_BT, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
