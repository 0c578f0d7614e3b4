"""rloo: distance from the mean of the other members (leave one out; arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rloo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = R_i - sum over j != i of R_j / (G - 1) = G / (G - 1) (R_i - mean).

    rewards: [G]. A lone sample has no others and gives exactly 0, never its raw reward; equal rewards give 0 too.

    >>> rloo(np.array([1.0, 0.0, 0.5])).tolist()  # the others' means: 0.25, 0.75, 0.5
    [0.75, -0.75, 0.0]
    """
    size = len(rewards)
    if size < 2 or rewards.max() == rewards.min():
        return np.zeros(size)
    advantages: NDArray[np.float64] = size / (size - 1) * (rewards - rewards.mean())
    return advantages
