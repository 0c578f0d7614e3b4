"""The distribution that is sampled from, and the draw: functions of logits, a request's sampling, its seed and the place.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from schemas.records import Sampling
from schemas.seeds import derive_seed


def processed_logprobs(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Log-probs [B, V] of the distribution that is sampled from: temperature, then min-p, top-k and top-p.

    >>> two = torch.tensor([[0.0, 2.0]])
    >>> processed_logprobs(two, [Sampling(temperature=2.0)]).exp()
    tensor([[0.2689, 0.7311]])
    >>> processed_logprobs(two, [Sampling(top_k=1)]).exp()
    tensor([[0., 1.]])
    """
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], device=logits_BV.device)
    logits_BV = logits_BV / temperatures
    for row, sampling in enumerate(samplings):
        if sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
            logits_BV[row] = _truncated(logits_BV[row], sampling)
    return logits_BV.log_softmax(-1)


def _truncated(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    lowest = float("-inf")
    if sampling.min_p > 0:
        probs_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), lowest)
    if 0 < sampling.top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], lowest)
    if sampling.top_p < 1:
        ordered, order = logits_V.sort(descending=True)
        probs = ordered.softmax(-1)
        ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, lowest)  # the most likely one stays
        logits_V = torch.empty_like(logits_V).scatter(0, order, ordered)
    return logits_V


def draw(logprobs_BV: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A token [B] for each row, by inverting its cumulative distribution at a number made from (seed, token index).

    >>> draw(torch.tensor([[0.25, 0.75]]).log(), [(1, 0)]) == draw(torch.tensor([[0.25, 0.75]]).log(), [(1, 0)])
    tensor([True])
    """
    uniform = [[(derive_seed(seed, index) >> 10) * 2.0**-53] for seed, index in places]
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    threshold_B1 = torch.tensor(uniform, dtype=torch.float64, device=logprobs_BV.device) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1)  # never one of probability 0
