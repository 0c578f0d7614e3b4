"""none: no correction, for tokens that the very weights being trained have sampled."""

from __future__ import annotations

import torch

from trainers.corrections import CorrectionInputs, CorrectionOutputs


def none(inputs: CorrectionInputs) -> CorrectionOutputs:
    """w = 1.

    >>> none(CorrectionInputs(log_weight_BT=torch.tensor([[0.7]]), mask_BT=torch.tensor([[True]]))).weights_BT.tolist()
    [[1.0]]
    """
    return CorrectionOutputs(weights_BT=torch.ones_like(inputs.log_weight_BT))
