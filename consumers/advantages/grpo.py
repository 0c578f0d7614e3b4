"""grpo: distance from the group's mean in standard deviations of the group (arXiv 2402.03300)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def grpo(rewards: NDArray[np.float64], *, eps: float = 1e-6) -> NDArray[np.float64]:
    """A_i = (R_i - mean) / (std + eps), with the sample's standard deviation (ddof 1).

    rewards: [G]. Equal rewards give exactly 0, and so does a lone sample: its standard deviation is not a number, and
    adding eps would not help.

    >>> grpo(np.array([1.0, 0.0])).round(4).tolist()  # mean 0.5, std 0.7071
    [0.7071, -0.7071]
    >>> grpo(np.array([0.7])).tolist()
    [0.0]
    """
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return np.zeros(len(rewards))
    advantages: NDArray[np.float64] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + eps)
    return advantages
