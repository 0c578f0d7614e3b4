"""Entropy of the distribution at each position, and the bonus for keeping it up. Pure.

Shapes: B = rows, T = positions, V = vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from trainers.masked import masked


def entropies(logits: Tensor) -> Tensor:
    """H = -sum_v p_v ln p_v in nats, of the softmax over the last dimension; tokens of logit -inf count nothing.

    Written as logsumexp - sum p logit, so that no probability's logarithm is taken. It needs another tensor as large as
    the logits: give it a chunk of positions at a time where the vocabulary is large.

    >>> import torch
    >>> round(entropies(torch.zeros(4)).item(), 4)  # ln 4
    1.3863
    """
    probabilities = logits.softmax(dim=-1)
    finite = logits.masked_fill(probabilities == 0, 0.0)
    return logits.logsumexp(dim=-1) - (probabilities * finite).sum(dim=-1)


def entropy_bonus(entropies_BT: Tensor, mask_BT: Tensor, coefficient: float) -> Tensor:
    """-coefficient H at each trainable token, 0 elsewhere: to be added to the per-token loss, before its reduction.

    The correction's weights do not belong on it: the entropy is that of the weights being trained, exactly.

    >>> import torch
    >>> entropy_bonus(torch.tensor([[2.0, 9.0]]), torch.tensor([[True, False]]), 0.25).tolist()
    [[-0.5, 0.0]]
    """
    return masked(-coefficient * entropies_BT, mask_BT)
