"""dppo-tv: tokens stop where their probability has moved too far, not their ratio (DPPO with total variation, arXiv 2602.04879)."""

from __future__ import annotations

import torch

from trainers.checks import check_not_negative, check_positive
from trainers.losses import LossInputs, LossOutputs, capped_policy_gradient
from trainers.masked import masked


def dppo_tv(inputs: LossInputs, *, limit_low: float = 0.2, limit_high: float = 0.2, cap: float = 20.0) -> LossOutputs:
    """x = -sg(keep min(u, cap)) A l, u = exp(l - lmu); keep = [p - q <= limit_high] if A > 0 else [p - q >= -limit_low].

    p = exp(l) and q = exp(lmu). A ratio says little about the distance between two policies: 0.001 -> 0.003 is a
    ratio of 3 and nothing, 0.5 -> 0.9 one of 1.8 and a lot. Only moves that go on in the direction of the advantage are
    stopped. The anchor is the sampler, as in the paper, so it goes with the correction "none".

    A rise from 0.5 to 0.9 is stopped, one from 0.001 to 0.003 is not:

    >>> p, q = torch.tensor([[0.9, 0.003]]), torch.tensor([[0.5, 0.001]])
    >>> out = dppo_tv(LossInputs(logprobs_BT=p.log(), proximal_BT=q.log(), behaviour_BT=q.log(),
    ...     advantages_BT=torch.ones(1, 2), mask_BT=torch.ones(1, 2, dtype=torch.bool)))
    >>> out.figures_BT["stopped"].tolist(), round(out.per_token_BT[0, 1].item(), 4)  # 3 * 5.8091
    ([[1.0, 0.0]], 17.4274)
    """
    check_not_negative("dppo-tv", "limit_low", limit_low)
    check_not_negative("dppo-tv", "limit_high", limit_high)
    check_positive("dppo-tv", "cap", cap)
    with torch.no_grad():
        mask_BT = inputs.mask_BT
        moved_BT = masked(inputs.logprobs_BT, mask_BT).exp() - masked(inputs.behaviour_BT, mask_BT).exp()
        keep_BT = torch.where(masked(inputs.advantages_BT, mask_BT) > 0, moved_BT <= limit_high, moved_BT >= -limit_low)
    return capped_policy_gradient(inputs, keep_BT, cap=cap)
