"""Off-policy corrections: `CorrectionInputs, *, <settings> -> CorrectionOutputs`, one weight per token.

The weight multiplies the per-token loss. It never carries a gradient. A token with weight 0 still counts in the
denominators: they are those before any rejection, so rejecting tokens makes a step smaller, not the rest of it larger.

With w = exp(lp - lmu) of a token, and of a row: its product W, its geometric mean:

| name | weight | source |
|---|---|---|
| token-truncated | min(w, cap) | Yao et al. 2025; AReaL, arXiv 2505.24298 |
| sequence-truncated | min(W, cap) for every token of the row | the same |
| icepop | w if low <= w <= high, else 0 | Ring-1T, arXiv 2510.18855 |
| geometric-band | w if low <= geometric mean <= high, else 0, for the whole row | sequence-masked truncation |
| rejection | 1 if k2 or k3 of a token or row <= limit, else 0 | a hard trust region |
| opsm | 0 for a row of negative advantage with mean(lmu - lp) > limit, else 1 | DeepSeek-V3.2, arXiv 2512.02556 |
| binary-gate | 1 if the KL or total variation of sampling the token or not <= limit, else 0 | arXiv 2602.04879 |
| none | 1 | only right when lp = lmu |

Those that give 1 and 0 only decide what is trained on; several corrections are multiplied (`product`), as in
token-truncated times opsm. `none` is also right with a loss that has its own ratio to the sampler
(`trainers.losses.FITS`), and where lp is set to lmu itself ("bypass": the loss's ratio is then exp(l - lmu), and to
multiply by w as well would weigh twice).

What needs all rows of an update at once is in `trainers.batch_corrections`; the signature is the same.

lp: log-probs of the trainer's weights when the batch was prepared; lmu: of the distribution really sampled from.
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CORRECTIONS: Mapping[str, str] = {
    "binary-gate": "trainers.corrections.binary_gate:binary_gate",
    "geometric-band": "trainers.corrections.geometric_band:geometric_band",
    "icepop": "trainers.corrections.icepop:icepop",
    "none": "trainers.corrections.none:none",
    "opsm": "trainers.corrections.opsm:opsm",
    "rejection": "trainers.corrections.rejection:rejection",
    "sequence-truncated": "trainers.corrections.sequence_truncated:sequence_truncated",
    "token-truncated": "trainers.corrections.token_truncated:token_truncated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """What a correction may look at; everything is detached and float32."""

    log_weight_BT: Tensor
    """lp - lmu, clamped to +-20; exactly 0 where the mask is False."""
    mask_BT: Tensor
    """bool: the trainable tokens."""
    behaviour_BT: Tensor | None = None
    """lmu, for those that look at probabilities and not only at ratios. Masked places may hold anything."""
    advantages_BT: Tensor | None = None
    """For those that look at them. Masked places may hold anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOutputs:
    """Weights, finite and at least 0, and per-token figures reported as means over the trainable tokens."""

    weights_BT: Tensor
    figures_BT: Mapping[str, Tensor] = field(default_factory=dict)


Correction = Callable[[CorrectionInputs], CorrectionOutputs]


def gate(keep: Tensor, inputs: CorrectionInputs, figure: str) -> CorrectionOutputs:
    """Weight 1 where `keep` (B x T or B x 1), else 0; `figure` is the share of trainable tokens left out.

    >>> inputs = CorrectionInputs(log_weight_BT=torch.zeros(1, 2), mask_BT=torch.tensor([[True, False]]))
    >>> out = gate(torch.tensor([[False]]), inputs, "rejected")
    >>> out.weights_BT.tolist(), out.figures_BT["rejected"].tolist()
    ([[0.0, 0.0]], [[1.0, 0.0]])
    """
    keep_BT = keep.expand_as(inputs.mask_BT)
    weights_BT = keep_BT.to(inputs.log_weight_BT.dtype)
    return CorrectionOutputs(weights_BT=weights_BT, figures_BT={figure: (~keep_BT & inputs.mask_BT).float()})


def product(corrections: Sequence[Correction]) -> Correction:
    """Several corrections as one: their weights multiplied, their figures side by side. None at all: weight 1.

    A figure that two of them share (`rejected`) is the share of tokens that either names.

    >>> from trainers.corrections.token_truncated import token_truncated
    >>> twice = product([token_truncated, token_truncated])
    >>> inputs = CorrectionInputs(log_weight_BT=torch.tensor([[9.0]]), mask_BT=torch.tensor([[True]]))
    >>> twice(inputs).weights_BT.item()
    4.0
    """

    def multiplied(inputs: CorrectionInputs) -> CorrectionOutputs:
        weights_BT, figures_BT = torch.ones_like(inputs.log_weight_BT), dict[str, Tensor]()
        for correction in corrections:
            out = correction(inputs)
            weights_BT = weights_BT * out.weights_BT
            for name, value_BT in out.figures_BT.items():
                figures_BT[name] = torch.maximum(figures_BT[name], value_BT) if name in figures_BT else value_BT
        return CorrectionOutputs(weights_BT=weights_BT, figures_BT=figures_BT)

    return multiplied
