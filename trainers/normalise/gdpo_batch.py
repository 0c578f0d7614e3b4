"""gdpo-batch: the last step of GDPO, summed advantages standardised over the step's rows (arXiv 2601.05242)."""

from __future__ import annotations

import torch

from trainers.checks import check_not_negative
from trainers.masked import row_mean
from trainers.normalise import NormaliserInputs, NormaliserOutputs, on_rows, spread, standardised


def gdpo_batch(inputs: NormaliserInputs, *, eps: float = 1e-6) -> NormaliserOutputs:
    """(A - mean) / (std + eps) with the sample's deviation, over rows, of the advantages that the estimator gdpo made.

    The sum over reward parts grows with their number; this brings it back to one size. Every row counts once, however
    long. (verl whitens over tokens instead: the normaliser whiten does that.)

    >>> inputs = NormaliserInputs(advantages_BT=torch.tensor([[2.0, 2.0], [-2.0, 0.0]]),
    ...     mask_BT=torch.tensor([[True, True], [True, False]]), rewards_B=torch.zeros(2), rewards_BT=torch.zeros(2, 2))
    >>> gdpo_batch(inputs).advantages_BT.double().round(decimals=4).tolist()  # deviation 2.8284
    [[0.7071, 0.7071], [-0.7071, 0.0]]
    """
    check_not_negative("gdpo-batch", "eps", eps)
    advantages_BT, mask_BT = inputs.advantages_BT, inputs.mask_BT
    rows_B, trained_B = row_mean(advantages_BT, mask_BT)[:, 0], mask_BT.any(dim=1)
    out_B = torch.zeros_like(rows_B)
    out_B[trained_B] = standardised(rows_B[trained_B], eps=eps)
    return NormaliserOutputs(
        advantages_BT=on_rows(out_B, advantages_BT, mask_BT), figures=spread(advantages_BT, mask_BT, "advantage")
    )
