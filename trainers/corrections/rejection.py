"""rejection: tokens or rows that are too far from the trainer's weights are left out (a hard trust region)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainers.checks import check_not_negative, check_one_of
from trainers.corrections import CorrectionInputs, CorrectionOutputs, gate
from trainers.masked import row_max, row_mean, row_sum

ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k2": lambda log_BT: 0.5 * log_BT.square(),
    "k3": lambda log_BT: log_BT.exp() - 1.0 - log_BT,
}
LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values_BT, _mask_BT: values_BT,
    "row-mean": row_mean,
    "row-max": row_max,
    "row-sum": row_sum,
}


def rejection(
    inputs: CorrectionInputs, *, estimator: str = "k3", level: str = "row-mean", limit: float = 0.05
) -> CorrectionOutputs:
    """1 if the estimate of KL(behaviour, proximal) <= limit, else 0: of each token, or one for a whole row.

    With w = exp(lp - lmu): k2 = (ln w)^2 / 2, k3 = w - 1 - ln w. Both are 0 at w = 1 and grow on both sides, k3 faster
    where w > 1. `level`: "token", or "row-mean", "row-max", "row-sum", which keep or leave out whole rows.
    Kept tokens weigh 1: multiply with token-truncated to correct them as well.

    k3 of w = 2 is 1 - ln 2 = 0.31, of w = 1 it is 0; their mean is 0.15:

    >>> import torch
    >>> inputs = CorrectionInputs(log_weight_BT=torch.tensor([[2.0, 1.0]]).log(), mask_BT=torch.ones(1, 2).bool())
    >>> rejection(inputs, limit=0.2).weights_BT.tolist(), rejection(inputs, limit=0.2, level="token").weights_BT.tolist()
    ([[1.0, 1.0]], [[0.0, 1.0]])
    """
    check_one_of("rejection", "estimator", estimator, ESTIMATORS)
    check_one_of("rejection", "level", level, LEVELS)
    check_not_negative("rejection", "limit", limit)
    estimate_BT = ESTIMATORS[estimator](inputs.log_weight_BT.detach())
    return gate(LEVELS[level](estimate_BT, inputs.mask_BT) <= limit, inputs, "rejected")
