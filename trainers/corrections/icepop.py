"""icepop: the importance weight of each token inside a band, and nothing outside it (IcePop of Ring-1T, arXiv 2510.18855)."""

from __future__ import annotations

from trainers.checks import check_range
from trainers.corrections import CorrectionInputs, CorrectionOutputs


def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> CorrectionOutputs:
    """w if low <= w <= high, else 0, with w = exp(lp - lmu).

    A token on which sampler and trainer disagree that much is taken for a fault of one of them, and left out on both
    sides; token-truncated keeps it at the cap.

    Weights of 0.25, 1 and 8 become 0, 1 and 0:

    >>> import torch
    >>> out = icepop(CorrectionInputs(log_weight_BT=torch.tensor([[0.25, 1.0, 8.0]]).log(),
    ...     mask_BT=torch.ones(1, 3, dtype=torch.bool)))
    >>> out.weights_BT.tolist(), out.figures_BT["rejected"].tolist()
    ([[0.0, 1.0, 0.0]], [[1.0, 0.0, 1.0]])
    """
    check_range("icepop", low, high)
    weights_BT = inputs.log_weight_BT.detach().exp()
    keep_BT = (weights_BT >= low) & (weights_BT <= high)
    return CorrectionOutputs(
        weights_BT=weights_BT * keep_BT, figures_BT={"rejected": (~keep_BT & inputs.mask_BT).float()}
    )
