"""m2po: the tokens that have moved most are left out, until the second moment of the rest is small (M2PO, arXiv 2510.01161)."""

from __future__ import annotations

import torch

from trainers.checks import check_positive
from trainers.corrections import CorrectionInputs, CorrectionOutputs, gate


def m2po(inputs: CorrectionInputs, *, limit: float = 0.04) -> CorrectionOutputs:
    """0 for the fewest tokens of largest (lp - lmu)^2 without which the mean of the others' is <= limit; 1 for all others.

    The second moment of the log ratio bounds the variance that stale data bring, and cannot cancel as a mean can. With
    fresh data nothing is left out; with very stale data some tokens far out, instead of everything beyond a fixed ratio.
    Tokens that are equally far are left out together, so that their order does not matter. Kept tokens weigh 1.

    Squares of 0.01, 0.04 and 0.25 have the mean 0.1; without the last it is 0.025:

    >>> out = m2po(CorrectionInputs(log_weight_BT=torch.tensor([[0.1, -0.2, 0.5]]), mask_BT=torch.ones(1, 3).bool()))
    >>> out.weights_BT.tolist()
    [[1.0, 1.0, 0.0]]
    """
    check_positive("m2po", "limit", limit)
    squares_BT = inputs.log_weight_BT.detach().double().square()
    ascending_N = squares_BT[inputs.mask_BT].sort().values
    counts_N = torch.arange(1, len(ascending_N) + 1, device=ascending_N.device)
    num_kept = int((ascending_N.cumsum(0) <= limit * counts_N).sum())
    if num_kept == len(ascending_N):
        return gate(torch.ones_like(inputs.mask_BT), inputs, "m2po_rejected")
    return gate(squares_BT < ascending_N[num_kept], inputs, "m2po_rejected")
