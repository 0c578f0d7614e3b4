"""Components as a user would bring them, good and bad ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.records import Trajectory


def raw(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rewards themselves: not relative to the group."""
    return rewards


def raises(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """A bug that shows for some groups only."""
    if len(rewards) > 1 and rewards[0] > rewards[1]:
        raise IndexError("a bug")
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred


def not_finite(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divides by nothing."""
    return rewards / 0.0


def one_number(rewards: NDArray[np.float64]) -> float:
    """Not one for each member."""
    return float(rewards.mean())


def says_kept(trajectory: Trajectory) -> str:
    """A reason that would read as its opposite."""
    return "kept"
