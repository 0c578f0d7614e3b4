"""reinforce-plus-plus-baseline: rewards less their group's mean, whitened over the step (arXiv 2501.03262)."""

from __future__ import annotations

import torch
from torch import Tensor

from schemas.errors import SettingError
from trainers.checks import check_not_negative
from trainers.normalise import NormaliserInputs, NormaliserOutputs, on_rows, spread, whitened


def reinforce_plus_plus_baseline(inputs: NormaliserInputs, *, eps: float = 1e-8) -> NormaliserOutputs:
    """A = whitened (R - mean of the row's group), on all tokens of the row; whitened over the step's tokens.

    One deviation for the whole step instead of one for each group, which grpo takes: a group in which nearly all answers
    agree is then not blown up. The mean is that of all valid members of the group if the step knows it, else of the rows
    that are here; a lone row gives R - R = 0.

    Groups (1, 0) and (3, 3): 0.5, -0.5, 0, 0 with the deviation 0.4082:

    >>> inputs = NormaliserInputs(advantages_BT=torch.zeros(4, 1), mask_BT=torch.ones(4, 1, dtype=torch.bool),
    ...     rewards_B=torch.tensor([1.0, 0.0, 3.0, 3.0]), rewards_BT=torch.zeros(4, 1), groups=list("aabb"))
    >>> reinforce_plus_plus_baseline(inputs).advantages_BT[:, 0].double().round(decimals=4).tolist()
    [1.2247, -1.2247, 0.0, 0.0]
    """
    check_not_negative("reinforce-plus-plus-baseline", "eps", eps)
    means_B = _group_means(inputs) if inputs.group_means_B is None else inputs.group_means_B
    rows_BT = on_rows(inputs.rewards_B.double() - means_B.double(), inputs.advantages_BT, inputs.mask_BT)
    return NormaliserOutputs(
        advantages_BT=whitened(rows_BT, inputs.mask_BT, eps=eps), figures=spread(rows_BT, inputs.mask_BT, "advantage")
    )


def _group_means(inputs: NormaliserInputs) -> Tensor:
    """By group id alone: rows of a group may stand anywhere, and groups may be of any size."""
    if len(inputs.groups) != len(inputs.rewards_B):
        raise SettingError(
            f"reinforce-plus-plus-baseline needs the group of each row: {len(inputs.rewards_B)} rows, "
            f"{len(inputs.groups)} groups given"
        )
    number = {group: i for i, group in enumerate(dict.fromkeys(inputs.groups))}
    which_B = torch.tensor([number[group] for group in inputs.groups], device=inputs.rewards_B.device, dtype=torch.long)
    sums_G = torch.zeros(len(number), dtype=torch.float64, device=which_B.device)
    sums_G.index_add_(0, which_B, inputs.rewards_B.double())
    return (sums_G / torch.bincount(which_B, minlength=len(number)))[which_B]
