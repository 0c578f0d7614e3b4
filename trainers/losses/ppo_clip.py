"""ppo-clip: the clipped ratio, with a lower and an upper bound of their own (arXiv 1707.06347; clip-higher 2503.14476)."""

from __future__ import annotations

import torch

from trainers.losses import LossInputs, LossOutputs, log_ratio


def ppo_clip(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    """x = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(l - lp), the log ratio clamped to +-20.

    With one update per step lp equals l, so r is 1 in value and the gradient is that of -A l: nothing is clipped.
    Off-policy correction is not part of x; the step multiplies x by the correction's weights (decoupled PPO,
    arXiv 2110.00641).

    A ratio of 1.5 with advantage 2 counts as 1.28; a ratio of 0.5 with advantage -1 counts as 0.8:

    >>> ratios = torch.tensor([[1.5, 0.5, 0.5]])
    >>> zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    >>> out = ppo_clip(LossInputs(logprobs_BT=ratios.log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[2.0, -1.0, 1.0]]), mask_BT=mask))
    >>> [round(x, 4) for x in out.per_token_BT[0].tolist()]
    [-2.56, 0.8, -0.5]
    >>> out.figures_BT["clipped_high"].tolist(), out.figures_BT["clipped_low"].tolist()
    ([[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]])
    """
    mask_BT = inputs.mask_BT
    advantages_BT = torch.where(mask_BT, inputs.advantages_BT, 0.0)
    log_BT = log_ratio(inputs.logprobs_BT, inputs.proximal_BT, mask_BT)
    ratio_BT = log_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    with torch.no_grad():
        figures = {
            "clipped_low": ((ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)).float(),
            "clipped_high": ((ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)).float(),
            "ratio": torch.where(mask_BT, ratio_BT, 0.0),
        }
    return LossOutputs(per_token_BT=per_token_BT, figures_BT=figures)
