"""gspo-token: gspo's value, with a gradient of each token's own (GSPO-token, arXiv 2507.18071)."""

from __future__ import annotations

from trainers.checks import check_clip
from trainers.losses import LossInputs, LossOutputs, clipped_surrogate, row_ratio
from trainers.masked import masked


def gspo_token(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """x = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = sg(exp(mean over the row of l - lp)) exp(l - sg(l)).

    The value is gspo's, and so is a row's gradient when its advantages are all equal. When they differ (step rewards,
    values), each token's gradient is that of its own advantage. Reduction: seq-mean-token-mean.

    Two tokens with s = 1 and advantages 1 and 3 get slopes -1 and -3; gspo gives both -2:

    >>> import torch
    >>> l = torch.zeros(1, 2, requires_grad=True)
    >>> inputs = LossInputs(logprobs_BT=l, proximal_BT=torch.zeros(1, 2), behaviour_BT=torch.zeros(1, 2),
    ...     advantages_BT=torch.tensor([[1.0, 3.0]]), mask_BT=torch.ones(1, 2, dtype=torch.bool))
    >>> torch.autograd.grad(gspo_token(inputs).per_token_BT.sum(), l)[0].tolist()
    [[-1.0, -3.0]]
    """
    check_clip("gspo-token", clip_low, clip_high)
    own_BT = masked(inputs.logprobs_BT, inputs.mask_BT)
    ratio_BT = row_ratio(inputs).detach() * (own_BT - own_BT.detach()).exp()
    return clipped_surrogate(ratio_BT, inputs, clip_low=clip_low, clip_high=clip_high)
