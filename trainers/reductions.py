"""Reductions: how per-token losses become one number, as a coefficient per token. Pure.

Every reduction divides by counts of the WHOLE step, never of a micro-batch, so a step does not depend on how
it was cut up. The loss of a step is the sum over all its micro-batches of sum(coefficient * x).

| name | value | source |
|---|---|---|
| token-mean | sum m x / N | DAPO, arXiv 2503.14476 |
| seq-mean-token-mean | (1/n) sum_i (sum_t m x / L_i) | GRPO, arXiv 2402.03300 |
| seq-mean-token-sum | (1/n) sum_i sum_t m x | the episode's return, with no length in it |
| seq-mean-token-sum-norm | (1/n) sum_i (sum_t m x / H) | Dr. GRPO, arXiv 2503.20783 |

m = mask, L_i = trainable tokens of row i, N = those of the step, n = rows of the step with L_i > 0, H = a constant.
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from trainers.checks import check_positive

REDUCTIONS: Mapping[str, str] = {
    "token-mean": "trainers.reductions:token_mean",
    "seq-mean-token-mean": "trainers.reductions:seq_mean_token_mean",
    "seq-mean-token-sum": "trainers.reductions:seq_mean_token_sum",
    "seq-mean-token-sum-norm": "trainers.reductions:seq_mean_token_sum_norm",
}


class Totals(NamedTuple):
    """Counts of one whole update (with one update per step: of the step), over all its micro-batches."""

    tokens: int
    """N: trainable tokens."""
    sequences: int
    """n: rows with at least one of them."""


Reduction = Callable[[Tensor, Totals], Tensor]


def token_mean(mask_BT: Tensor, totals: Totals) -> Tensor:
    """m / N: every token weighs the same, so long answers weigh more.

    Two tokens here, six elsewhere in the step:

    >>> import torch
    >>> token_mean(torch.tensor([[True, True, False]]), Totals(8, 2)).tolist()
    [[0.125, 0.125, 0.0]]
    """
    return mask_BT.float() / max(totals.tokens, 1)


def seq_mean_token_mean(mask_BT: Tensor, totals: Totals) -> Tensor:
    """m / (n L_i): every sequence weighs the same.

    >>> import torch
    >>> seq_mean_token_mean(torch.tensor([[True, True, False], [False, False, True]]), Totals(3, 2)).tolist()
    [[0.25, 0.25, 0.0], [0.0, 0.0, 0.5]]
    """
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return mask_BT.float() / (lengths_B1 * max(totals.sequences, 1))


def seq_mean_token_sum(mask_BT: Tensor, totals: Totals) -> Tensor:
    """m / n: a long answer weighs in proportion to its length, and a step's size grows with the lengths.

    >>> import torch
    >>> seq_mean_token_sum(torch.tensor([[True, True, False]]), Totals(3, 2)).tolist()
    [[0.5, 0.5, 0.0]]
    """
    return mask_BT.float() / max(totals.sequences, 1)


def seq_mean_token_sum_norm(mask_BT: Tensor, totals: Totals, *, horizon: int) -> Tensor:
    """m / (n H): lengths do not matter, and H is a constant of yours (not the padded width, which would let padding in).

    >>> import torch
    >>> seq_mean_token_sum_norm(torch.tensor([[True, True, False]]), Totals(3, 2), horizon=4).tolist()
    [[0.125, 0.125, 0.0]]
    """
    check_positive("seq-mean-token-sum-norm", "horizon", horizon)
    return mask_BT.float() / (horizon * max(totals.sequences, 1))
