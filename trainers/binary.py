"""How far apart two policies are at one sampled token, seen as a choice between that token and all others. Pure.

p and q are the token's probability under each; what happens among the other tokens is not seen, so both numbers are
lower bounds of the real divergence (binary approximation, arXiv 2602.04879).
"""

from __future__ import annotations

from torch import Tensor

_LEAST_REST = 1e-8
"""Added to 1 - p and 1 - q: a certain token has no rest, and its log would be infinite."""


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """abs(p - q), from 0 to 1.

    >>> import torch
    >>> round(total_variation(torch.tensor(0.9).log(), torch.tensor(0.5).log()).item(), 4)
    0.4
    """
    return (log_p.exp() - log_q.exp()).abs()


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)), with 1e-8 added to 1 - p and 1 - q inside the logarithm.

    >>> import torch
    >>> round(kl(torch.tensor(0.5).log(), torch.tensor(0.9).log()).item(), 4)  # .5 ln(.5/.9) + .5 ln(.5/.1)
    0.5108
    """
    p, q = log_p.exp(), log_q.exp()
    return p * (log_p - log_q) + (1.0 - p) * ((1.0 - p + _LEAST_REST) / (1.0 - q + _LEAST_REST)).log()
