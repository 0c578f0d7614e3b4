"""geometric-band: rows whose mean weight is near 1, and nothing of all others (sequence-masked importance sampling)."""

from __future__ import annotations

import math

from trainers.checks import check_positive, check_range
from trainers.corrections import CorrectionInputs, CorrectionOutputs
from trainers.masked import row_mean


def geometric_band(
    inputs: CorrectionInputs, *, low: float = 0.99, high: float = 1.01, cap: float = math.inf
) -> CorrectionOutputs:
    """min(w, cap) for every token of a row if low <= exp(mean over the row of lp - lmu) <= high, else 0 for all of it.

    The geometric mean does not grow with length, so one band serves all rows; it lies close to 1, as a mean over many
    tokens does. The tokens of a row that is kept are weighed each by its own w, without a cap unless you give one.
    (verl's k1 rejection compares 1 / w with its band; a band that is not symmetric has to be turned round.)

    A row of weights 0.5 and 2 has the mean 1 and is kept; one of 1 and 2 has 1.41 and is not:

    >>> import torch
    >>> out = geometric_band(CorrectionInputs(log_weight_BT=torch.tensor([[0.5, 2.0], [1.0, 2.0]]).log(),
    ...     mask_BT=torch.ones(2, 2, dtype=torch.bool)))
    >>> out.weights_BT.tolist(), out.figures_BT["rejected"].tolist()
    ([[0.5, 2.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]])
    """
    check_range("geometric-band", low, high)
    check_positive("geometric-band", "cap", cap)
    log_BT = inputs.log_weight_BT.detach()
    mean_B1 = row_mean(log_BT, inputs.mask_BT).exp()
    keep_BT = ((mean_B1 >= low) & (mean_B1 <= high)).expand_as(inputs.mask_BT)
    return CorrectionOutputs(
        weights_BT=log_BT.exp().clamp(max=cap) * keep_BT,
        figures_BT={"rejected": (~keep_BT & inputs.mask_BT).float()},
    )
