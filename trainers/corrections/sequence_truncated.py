"""sequence-truncated: the importance weight of the whole row, cut off at a cap, for each of its tokens (Yao et al. 2025)."""

from __future__ import annotations

from trainers.checks import check_positive
from trainers.corrections import CorrectionInputs, CorrectionOutputs
from trainers.losses import MAX_LOG_RATIO
from trainers.masked import row_sum


def sequence_truncated(inputs: CorrectionInputs, *, cap: float = 2.0) -> CorrectionOutputs:
    """W = min(exp(sum over the row of lp - lmu), cap), the sum clamped to +-20.

    Without the cap this is the unbiased weight of a row, and its variance grows with the row's length: of a long row it
    is near 0 or at the cap. Token weights are biased and calm.

    Weights of 0.5 and 8 multiply to 4 and become 2:

    >>> import torch
    >>> out = sequence_truncated(CorrectionInputs(log_weight_BT=torch.tensor([[0.5, 8.0]]).log(),
    ...     mask_BT=torch.ones(1, 2, dtype=torch.bool)))
    >>> out.weights_BT.tolist(), out.figures_BT["truncated"].tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])
    """
    check_positive("sequence-truncated", "cap", cap)
    sum_B1 = row_sum(inputs.log_weight_BT.detach(), inputs.mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights_BT = sum_B1.exp().expand_as(inputs.mask_BT)
    return CorrectionOutputs(
        weights_BT=weights_BT.clamp(max=cap), figures_BT={"truncated": ((weights_BT > cap) & inputs.mask_BT).float()}
    )
