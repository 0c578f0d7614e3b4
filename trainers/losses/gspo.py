"""gspo: ppo-clip of whole rows, by the geometric mean of their ratios (GSPO, arXiv 2507.18071)."""

from __future__ import annotations

from trainers.checks import check_clip
from trainers.losses import LossInputs, LossOutputs, clipped_surrogate, row_ratio


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """x = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean over the row of l - lp), for all its tokens.

    A reward belongs to a whole answer, so the ratio does too. s moves far less than a token's ratio, hence bounds so
    much tighter than those of ppo-clip. The gradient of s runs through every token of the row, so with advantages that
    differ inside it each token is weighed by their mean; gspo-token weighs it by its own. The paper's value is the mean
    over the row and then over rows: reduction seq-mean-token-mean.

    Ratios of 4 and 1 have the geometric mean 2, which is clipped where A > 0:

    >>> import torch
    >>> zeros, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    >>> out = gspo(LossInputs(logprobs_BT=torch.tensor([[4.0, 1.0]] * 2).log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), mask_BT=mask))
    >>> [[round(x, 4) for x in row] for row in out.per_token_BT.tolist()]
    [[-1.0004, -1.0004], [2.0, 2.0]]
    """
    check_clip("gspo", clip_low, clip_high)
    ratio_BT = row_ratio(inputs).expand_as(inputs.mask_BT)
    return clipped_surrogate(ratio_BT, inputs, clip_low=clip_low, clip_high=clip_high)
