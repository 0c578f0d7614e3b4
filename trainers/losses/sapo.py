"""sapo: a ratio that fades out smoothly instead of being clipped (SAPO, arXiv 2511.20347)."""

from __future__ import annotations

import torch

from trainers.checks import check_positive
from trainers.losses import LossInputs, LossOutputs, log_ratio
from trainers.masked import masked


def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossOutputs:
    """x = -A (4 / tau) sigmoid(tau (r - 1)) with r = exp(l - lp); tau = tau_positive where A > 0, else tau_negative.

    At r = 1 the slope is that of -A l; it fades on both sides, faster with a larger tau. Tokens of negative advantage
    fade faster, as they spread probability over many tokens that were not sampled. The paper averages over rows:
    reduction seq-mean-token-mean.

    At r = 1 and advantage 1: 4 sigmoid(0) = 2.

    >>> zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> out = sapo(LossInputs(logprobs_BT=torch.tensor([[1.0, 2.0]]).log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.ones(1, 2), mask_BT=mask))
    >>> [round(x, 4) for x in out.per_token_BT[0].tolist()]  # 4 sigmoid(1) = 2.9242
    [-2.0, -2.9242]
    """
    check_positive("sapo", "tau_positive", tau_positive)
    check_positive("sapo", "tau_negative", tau_negative)
    mask_BT, advantages_BT = inputs.mask_BT, masked(inputs.advantages_BT, inputs.mask_BT)
    ratio_BT = log_ratio(inputs.logprobs_BT, inputs.proximal_BT, mask_BT).exp()
    tau_BT = torch.where(advantages_BT > 0, torch.full_like(ratio_BT, tau_positive), tau_negative)
    per_token_BT = -advantages_BT * (4.0 / tau_BT) * torch.sigmoid(tau_BT * (ratio_BT - 1.0))
    return LossOutputs(per_token_BT=per_token_BT, figures_BT={"ratio": masked(ratio_BT.detach(), mask_BT)})
