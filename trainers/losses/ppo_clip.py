"""ppo-clip: the clipped ratio, with a lower and an upper bound of their own (arXiv 1707.06347; clip-higher 2503.14476)."""

from __future__ import annotations

from trainers.checks import check_clip
from trainers.losses import LossInputs, LossOutputs, clipped_surrogate, log_ratio


def ppo_clip(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    """x = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(l - lp), the log ratio clamped to +-20.

    With one update per step lp equals l, so r is 1 in value and the gradient is that of -A l: nothing is clipped.
    Off-policy correction is not part of x; the step multiplies x by the correction's weights (decoupled PPO,
    arXiv 2110.00641).

    A ratio of 1.5 with advantage 2 counts as 1.28; a ratio of 0.5 with advantage -1 counts as 0.8:

    >>> import torch
    >>> ratios = torch.tensor([[1.5, 0.5, 0.5]])
    >>> zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    >>> out = ppo_clip(LossInputs(logprobs_BT=ratios.log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[2.0, -1.0, 1.0]]), mask_BT=mask))
    >>> [round(x, 4) for x in out.per_token_BT[0].tolist()]
    [-2.56, 0.8, -0.5]
    >>> out.figures_BT["clipped_high"].tolist(), out.figures_BT["clipped_low"].tolist()
    ([[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]])
    """
    check_clip("ppo-clip", clip_low, clip_high)
    ratio_BT = log_ratio(inputs.logprobs_BT, inputs.proximal_BT, inputs.mask_BT).exp()
    return clipped_surrogate(ratio_BT, inputs, clip_low=clip_low, clip_high=clip_high)
