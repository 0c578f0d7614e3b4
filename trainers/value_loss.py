"""The loss of a value head: half the squared error, clipped around the values of the step's beginning (arXiv 1707.06347). Pure.

Shapes: B = rows, T = positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainers.checks import check_positive
from trainers.losses import LossOutputs
from trainers.masked import masked


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float = 0.2
) -> LossOutputs:
    """x = max((V - R)^2, (clip(V, Vold - clip, Vold + clip) - R)^2) / 2 at each trainable token, 0 elsewhere.

    V comes from the weights being trained and alone has a gradient, Vold from the step's beginning, R are the returns
    (`trainers.gae`). A value that has moved towards R by more than `clip` is stopped. `clip = inf` is plain squared error.

    V = 1 with Vold = 0 and R = 2 counts as 0.2: (0.2 - 2)^2 / 2.

    >>> out = value_loss(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.tensor([[True]]))
    >>> round(out.per_token_BT.item(), 4), out.figures_BT["value_clipped"].item()
    (1.62, 1.0)
    """
    check_positive("value_loss", "clip", clip)
    value_BT, old_BT = masked(values_BT, mask_BT), masked(old_values_BT, mask_BT).detach()
    return_BT = masked(returns_BT, mask_BT).detach()
    near_BT = torch.clamp(value_BT, old_BT - clip, old_BT + clip)
    plain_BT, clipped_BT = (value_BT - return_BT).square(), (near_BT - return_BT).square()
    return LossOutputs(
        per_token_BT=0.5 * torch.maximum(plain_BT, clipped_BT),
        figures_BT={
            "value_clipped": (clipped_BT > plain_BT).float().detach(),
            "value_error": plain_BT.detach(),
        },
    )
