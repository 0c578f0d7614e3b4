"""zero-spread: a group whose members all earned the same has no advantage and is dropped (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def zero_spread(rewards: NDArray[np.float64], *, tol: float = 1e-6) -> str | None:
    """Return "zero-spread" when max - min <= tol.

    >>> zero_spread(np.array([0.5, 0.5])), zero_spread(np.array([0.5, 1.0]))
    ('zero-spread', None)
    """
    return "zero-spread" if rewards.max() - rewards.min() <= tol else None
