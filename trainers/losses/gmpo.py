"""gmpo: the geometric mean of a row's ratios, each clipped on the side where it gains (GMPO, arXiv 2507.20673)."""

from __future__ import annotations

import torch

from trainers.checks import check_not_negative
from trainers.losses import MAX_LOG_RATIO, LossInputs, LossOutputs, difference
from trainers.masked import masked, row_mean


def gmpo(inputs: LossInputs, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> LossOutputs:
    """x = -mean(A) exp(mean over the row of d), d = min(l - lp, log_clip_high) if A > 0 else max(l - lp, -log_clip_low).

    The bounds are those of the log ratio: 0.4 lets a ratio go from 0.67 to 1.49, wider than ppo-clip does, since the
    geometric mean hardly feels one far token. As in ppo-clip a token is stopped only where going on would gain. A token
    of advantage 0 counts as ratio 1. All tokens of a row hold the row's value: reduction seq-mean-token-mean.

    Ratios of 4 (clipped to exp(0.4)) and 1 with advantage 2 give -2 exp(0.2):

    >>> zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> out = gmpo(LossInputs(logprobs_BT=torch.tensor([[4.0, 1.0]]).log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[2.0, 2.0]]), mask_BT=mask))
    >>> [round(x, 4) for x in out.per_token_BT[0].tolist()], out.figures_BT["clipped_high"].tolist()
    ([-2.4428, -2.4428], [[1.0, 0.0]])
    """
    check_not_negative("gmpo", "log_clip_low", log_clip_low)
    check_not_negative("gmpo", "log_clip_high", log_clip_high)
    mask_BT, advantages_BT = inputs.mask_BT, masked(inputs.advantages_BT, inputs.mask_BT)
    log_BT = difference(inputs.logprobs_BT, inputs.proximal_BT, mask_BT)
    stopped_BT = torch.where(advantages_BT > 0, log_BT.clamp(max=log_clip_high), log_BT.clamp(min=-log_clip_low))
    stopped_BT = torch.where(advantages_BT == 0, 0.0, stopped_BT)
    ratio_B1 = row_mean(stopped_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    row_B1 = -row_mean(advantages_BT, mask_BT) * ratio_B1
    with torch.no_grad():
        figures = {
            "clipped_low": ((log_BT < -log_clip_low) & (advantages_BT < 0)).float(),
            "clipped_high": ((log_BT > log_clip_high) & (advantages_BT > 0)).float(),
            "ratio": masked(ratio_B1.detach().expand_as(mask_BT), mask_BT),
        }
    return LossOutputs(per_token_BT=masked(row_B1.expand_as(mask_BT), mask_BT), figures_BT=figures)
