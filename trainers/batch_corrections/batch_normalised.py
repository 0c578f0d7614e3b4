"""batch-normalised: truncated importance weights divided by their mean over the update (self-normalised sampling)."""

from __future__ import annotations

from trainers.checks import check_one_of
from trainers.corrections import CorrectionInputs, CorrectionOutputs
from trainers.corrections.sequence_truncated import sequence_truncated
from trainers.corrections.token_truncated import token_truncated
from trainers.masked import masked

WEIGHTS = {"token": token_truncated, "row": sequence_truncated}
_LEAST_MEAN = 1e-8
"""The mean counts as this at least: weights that are all next to nothing stay so, and 0 / 0 does not come up."""


def batch_normalised(inputs: CorrectionInputs, *, level: str = "token", cap: float = 2.0) -> CorrectionOutputs:
    """w~ / mean(w~), with w~ = min(w, cap) of tokens (mean over the update's tokens) or of rows (mean over its rows).

    Truncation makes weights small on average, the more so the staler the data, and steps with them; divided by their
    mean they keep a step's size. All of them 0 stays 0. It includes token-truncated or sequence-truncated: not both.

    Weights of 0.5, 1 and 8 become 0.5, 1 and 2, whose mean is 3.5 / 3:

    >>> import torch
    >>> out = batch_normalised(CorrectionInputs(log_weight_BT=torch.tensor([[0.5, 1.0, 8.0]]).log(),
    ...     mask_BT=torch.ones(1, 3, dtype=torch.bool)))
    >>> [round(w, 4) for w in out.weights_BT[0].tolist()]
    [0.4286, 0.8571, 1.7143]
    """
    check_one_of("batch-normalised", "level", level, WEIGHTS)
    out = WEIGHTS[level](inputs, cap=cap)
    mask_BT = inputs.mask_BT
    if level == "token":
        weights_N = out.weights_BT[mask_BT]
    else:
        weights_N = out.weights_BT[:, 0][mask_BT.any(dim=1)]
    mean = float(weights_N.double().mean()) if len(weights_N) else 1.0
    return CorrectionOutputs(
        weights_BT=masked(out.weights_BT, mask_BT) / max(mean, _LEAST_MEAN), figures_BT=out.figures_BT
    )
