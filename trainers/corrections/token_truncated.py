"""token-truncated: the importance weight of each token, cut off at a cap (truncated importance sampling, Yao et al. 2025)."""

from __future__ import annotations

from trainers.checks import check_positive
from trainers.corrections import CorrectionInputs, CorrectionOutputs


def token_truncated(inputs: CorrectionInputs, *, cap: float = 2.0) -> CorrectionOutputs:
    """w = min(exp(lp - lmu), cap). Small weights stay small; only large ones are cut, which bounds the variance.

    Weights of 0.5, 1 and 8 become 0.5, 1 and 2:

    >>> import torch
    >>> out = token_truncated(CorrectionInputs(log_weight_BT=torch.tensor([[0.5, 1.0, 8.0]]).log(),
    ...     mask_BT=torch.ones(1, 3, dtype=torch.bool)))
    >>> [round(w, 4) for w in out.weights_BT[0].tolist()], out.figures_BT["truncated"].tolist()
    ([0.5, 1.0, 2.0], [[0.0, 0.0, 1.0]])
    """
    check_positive("token-truncated", "cap", cap)
    weights_BT = inputs.log_weight_BT.detach().exp()
    return CorrectionOutputs(
        weights_BT=weights_BT.clamp(max=cap), figures_BT={"truncated": ((weights_BT > cap) & inputs.mask_BT).float()}
    )
