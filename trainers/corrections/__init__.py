"""Off-policy corrections: `CorrectionInputs, *, <settings> -> CorrectionOutputs`, one weight per token.

The weight multiplies the per-token loss. It never carries a gradient. A token with weight 0 still counts in the
denominators: they are those before any rejection, so rejecting tokens makes a step smaller, not the rest of it larger.

| name | weight | source |
|---|---|---|
| token-truncated | min(exp(lp - lmu), cap) | Yao et al. 2025; AReaL, arXiv 2505.24298 |
| none | 1 | only right when lp = lmu |

lp: log-probs of the trainer's weights when the batch was prepared; lmu: of the distribution really sampled from.
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

CORRECTIONS: Mapping[str, str] = {
    "none": "trainers.corrections.none:none",
    "token-truncated": "trainers.corrections.token_truncated:token_truncated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """What a correction may look at; everything is detached and float32."""

    log_weight_BT: Tensor
    """lp - lmu, clamped to +-20; exactly 0 where the mask is False."""
    mask_BT: Tensor
    """bool: the trainable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOutputs:
    """Weights, finite and at least 0, and per-token figures reported as means over the trainable tokens."""

    weights_BT: Tensor
    figures_BT: Mapping[str, Tensor] = field(default_factory=dict)


Correction = Callable[[CorrectionInputs], CorrectionOutputs]
