"""dppo-kl: tokens stop where the KL of sampling them or not has grown too far (DPPO with KL, arXiv 2602.04879)."""

from __future__ import annotations

import torch

from trainers import binary
from trainers.checks import check_not_negative, check_positive
from trainers.losses import LossInputs, LossOutputs, capped_policy_gradient
from trainers.masked import masked


def dppo_kl(inputs: LossInputs, *, limit_low: float = 0.05, limit_high: float = 0.05, cap: float = 20.0) -> LossOutputs:
    """x = -sg(keep min(u, cap)) A l, u = exp(l - lmu), with d = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)).

    keep = [d <= limit_high or p <= q] if A > 0 else [d <= limit_low or p >= q], with p = exp(l), q = exp(lmu): only
    moves that go on in the direction of the advantage are stopped. As dppo-tv, but strict with tokens near certainty.
    The anchor is the sampler, so it goes with the correction "none".

    A rise from 0.5 to 0.9 has d = 0.5108 and is stopped; the same step back, with a positive advantage, is not:

    >>> p, q = torch.tensor([[0.9, 0.5]]), torch.tensor([[0.5, 0.9]])
    >>> out = dppo_kl(LossInputs(logprobs_BT=p.log(), proximal_BT=q.log(), behaviour_BT=q.log(),
    ...     advantages_BT=torch.ones(1, 2), mask_BT=torch.ones(1, 2, dtype=torch.bool)))
    >>> out.figures_BT["stopped"].tolist()
    [[1.0, 0.0]]
    """
    check_not_negative("dppo-kl", "limit_low", limit_low)
    check_not_negative("dppo-kl", "limit_high", limit_high)
    check_positive("dppo-kl", "cap", cap)
    with torch.no_grad():
        mask_BT = inputs.mask_BT
        log_p_BT, log_q_BT = masked(inputs.logprobs_BT, mask_BT), masked(inputs.behaviour_BT, mask_BT)
        distance_BT = binary.kl(log_q_BT, log_p_BT)
        keep_BT = torch.where(
            masked(inputs.advantages_BT, mask_BT) > 0,
            (distance_BT <= limit_high) | (log_p_BT <= log_q_BT),
            (distance_BT <= limit_low) | (log_p_BT >= log_q_BT),
        )
    return capped_policy_gradient(inputs, keep_BT, cap=cap)
