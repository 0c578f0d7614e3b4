"""whiten: advantages of mean 0 and variance 1 over the whole step (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

import torch

from trainers.checks import check_not_negative, check_one_of
from trainers.masked import row_mean
from trainers.normalise import NormaliserInputs, NormaliserOutputs, on_rows, spread, standardised, whitened


def whiten(inputs: NormaliserInputs, *, over: str = "tokens", eps: float = 1e-8) -> NormaliserOutputs:
    """(A - mean) / sqrt(var + eps), with the sample's variance, over the step's trainable tokens or its rows.

    `over`: "tokens" lets a long row count as often as it has tokens; "rows" takes each row's mean advantage once, and
    gives it to all its tokens. Equal advantages, and a lone one, give exactly 0.

    >>> inputs = NormaliserInputs(advantages_BT=torch.tensor([[1.0, 1.0], [4.0, 9.0]]),
    ...     mask_BT=torch.tensor([[True, True], [True, False]]), rewards_B=torch.zeros(2), rewards_BT=torch.zeros(2, 2))
    >>> whiten(inputs).advantages_BT.double().round(decimals=4).tolist()  # of 1, 1, 4: mean 2, variance 3
    [[-0.5774, -0.5774], [1.1547, 0.0]]
    >>> whiten(inputs, over="rows").advantages_BT.double().round(decimals=4).tolist()  # of 1, 4
    [[-0.7071, -0.7071], [0.7071, 0.0]]
    """
    check_one_of("whiten", "over", over, ("tokens", "rows"))
    check_not_negative("whiten", "eps", eps)
    advantages_BT, mask_BT = inputs.advantages_BT, inputs.mask_BT
    figures = spread(advantages_BT, mask_BT, "advantage")
    if over == "tokens":
        return NormaliserOutputs(advantages_BT=whitened(advantages_BT, mask_BT, eps=eps), figures=figures)
    rows_B = row_mean(advantages_BT, mask_BT)[:, 0]
    trained_B = mask_BT.any(dim=1)
    out_B = torch.zeros_like(rows_B)
    out_B[trained_B] = standardised(rows_B[trained_B], eps=eps, inside=True)
    return NormaliserOutputs(advantages_BT=on_rows(out_B, advantages_BT, mask_BT), figures=figures)
