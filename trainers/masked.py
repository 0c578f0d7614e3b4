"""Sums, means and scans over the trainable tokens of padded rows. Pure; what stands at masked places is never read.

Everything that is masked is replaced before it is used: a NaN that is only multiplied by 0 stays a NaN.
Shapes: B = rows, T = positions, L = trainable tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values, 0 where the mask is False.

    >>> masked(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]])).tolist()
    [[1.0, 0.0]]
    """
    return torch.where(mask_BT, values_BT, 0.0)


def row_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over each row's trainable tokens, as B x 1.

    >>> row_sum(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])).tolist()
    [[3.0]]
    """
    return masked(values_BT, mask_BT).sum(dim=1, keepdim=True)


def row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over each row's trainable tokens, as B x 1; 0 for a row without any.

    >>> row_mean(torch.tensor([[1.0, 2.0, 9.0], [5.0, 5.0, 5.0]]), torch.tensor([[True, True, False], [False] * 3])).tolist()
    [[1.5], [0.0]]
    """
    return row_sum(values_BT, mask_BT) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def row_max(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Greatest of each row's trainable tokens, as B x 1; 0 for a row without any.

    >>> row_max(torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[True, True, False]])).tolist()
    [[-1.0]]
    """
    greatest_B1 = torch.where(mask_BT, values_BT, -torch.inf).amax(dim=1, keepdim=True)
    return torch.where(mask_BT.any(dim=1, keepdim=True), greatest_B1, 0.0)


def packed(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Each row's trainable tokens side by side, from the left, padded with 0: B x L.

    >>> packed(torch.tensor([[1.0, 9.0, 2.0], [9.0, 9.0, 3.0]]), torch.tensor([[1, 0, 1], [0, 0, 1]]).bool()).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    """
    lengths_B = mask_BT.sum(dim=1)
    width = int(lengths_B.max()) if len(lengths_B) else 0
    out_BL = values_BT.new_zeros(len(values_BT), width)
    out_BL[torch.arange(width, device=mask_BT.device) < lengths_B[:, None]] = values_BT[mask_BT]
    return out_BL


def unpacked(values_BL: Tensor, mask_BT: Tensor) -> Tensor:
    """What `packed` was given, 0 where the mask is False: B x T.

    >>> mask = torch.tensor([[True, False, True]])
    >>> unpacked(packed(torch.tensor([[1.0, 9.0, 2.0]]), mask), mask).tolist()
    [[1.0, 0.0, 2.0]]
    """
    out_BT = values_BL.new_zeros(mask_BT.shape)
    width = values_BL.shape[1]
    out_BT[mask_BT] = values_BL[torch.arange(width, device=mask_BT.device) < mask_BT.sum(dim=1)[:, None]]
    return out_BT


def discounted_sums(values_BL: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount y_{t+1} along each row, in ceil(log2 L) passes over whole tensors instead of L small ones.

    After the pass of stride s, y_t holds the terms x_t .. x_{t + 2s - 1}, so each pass adds discount^s y_{t+s}.

    >>> discounted_sums(torch.tensor([[1.0, 2.0, 4.0]]), 0.5).tolist()  # 4; 2 + 4 / 2; 1 + 4 / 2
    [[3.0, 4.0, 4.0]]
    """
    sums_BL, stride = values_BL, 1
    while stride < values_BL.shape[1]:
        added_BL = torch.zeros_like(sums_BL)
        added_BL[:, :-stride] = sums_BL[:, stride:]
        sums_BL = sums_BL + discount**stride * added_BL
        stride *= 2
    return sums_BL
