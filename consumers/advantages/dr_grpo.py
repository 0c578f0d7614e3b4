"""dr-grpo: distance from the group's mean, not divided by its spread (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dr_grpo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = R_i - mean. Meant for a loss that divides by a constant length, as the paper does.

    rewards: [G]. Equal rewards give exactly 0, and so does a lone sample.

    >>> dr_grpo(np.array([1.0, 0.0, 0.0, 1.0])).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    if len(rewards) < 2 or rewards.max() == rewards.min():
        return np.zeros(len(rewards))
    advantages: NDArray[np.float64] = rewards - rewards.mean()
    return advantages
