"""Returns and generalised advantage estimates along the trainable tokens of each row (GAE, arXiv 1506.02438). Pure.

"Next" always means the next TRAINABLE token: what a tool or a template wrote is no action of the policy's, takes no
time and carries no reward. The value of a token's state is what the value head says before the token is known.
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainers.masked import discounted_sums, packed, unpacked


class Estimates(NamedTuple):
    """Advantages and the targets of the value head, 0 where the mask is False."""

    advantages_BT: Tensor
    returns_BT: Tensor


def rewards_at_end(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Each row's reward on its last trainable token, 0 elsewhere; lost for a row without any, which trains nothing.

    >>> rewards_at_end(torch.tensor([5.0]), torch.tensor([[True, True, False, True, False]])).tolist()
    [[0.0, 0.0, 0.0, 5.0, 0.0]]
    """
    after_BT = mask_BT.flip(1).cumsum(dim=1).flip(1)
    return torch.where(mask_BT & (after_BT == 1), rewards_B[:, None], torch.zeros_like(rewards_B)[:, None])


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_t', t' the next trainable token; 0 where the mask is False. Rewards there are not read.

    >>> returns_to_go(torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]]), gamma=0.5).tolist()
    [[3.0, 0.0, 4.0]]
    """
    return unpacked(discounted_sums(packed(rewards_BT, mask_BT), gamma), mask_BT)


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_B: Tensor | None = None,
) -> Estimates:
    """d_t = r_t + gamma V_t' - V_t; A_t = d_t + gamma lam A_t', t' the next trainable token; returns A + V.

    After a row's last trainable token V_t' is 0, or `bootstrap_B`: give there the value of the state in which a row was
    cut off (length or turn limit), and 0 for rows that ended by themselves; otherwise a long answer looks like a bad one.
    Nothing is whitened. Computed in float64.

    Values 1 and 2, reward 3 at the end, gamma 1, lam 0.5: d = (0 + 2 - 1, 3 - 2), A = (1 + 0.5 * 1, 1):

    >>> out = gae(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool), lam=0.5)
    >>> out.advantages_BT.tolist(), out.returns_BT.tolist()
    ([[1.5, 1.0]], [[2.5, 3.0]])
    """
    rewards_BL, values_BL = packed(rewards_BT, mask_BT).double(), packed(values_BT, mask_BT).double()
    lengths_B = mask_BT.sum(dim=1)
    next_BL = torch.zeros_like(values_BL)
    next_BL[:, :-1] = values_BL[:, 1:]
    if bootstrap_B is not None:
        rows_N = lengths_B.nonzero()[:, 0]
        next_BL[rows_N, lengths_B[rows_N] - 1] = bootstrap_B[rows_N].double()
    advantages_BL = discounted_sums(rewards_BL + gamma * next_BL - values_BL, gamma * lam)
    return Estimates(
        unpacked(advantages_BL, mask_BT).to(values_BT.dtype),
        unpacked(advantages_BL + values_BL, mask_BT).to(values_BT.dtype),
    )
