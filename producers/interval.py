"""The mean of some rewards with its 95 % confidence interval: Wilson's where all are 0 or 1, Student's otherwise. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Z_95 = 1.959963984540054
_MANY = 1000
_HALVINGS = 60


class Estimate(NamedTuple):
    """A mean, and bounds that hold it between them."""

    mean: float
    low: float
    high: float


def estimate(rewards: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent rewards. Raises ValueError for none, and for one that is neither 0 nor 1.

    >>> [round(number, 4) for number in estimate([1, 1, 1, 0])]  # Wilson (1927)
    [0.75, 0.3006, 0.9544]
    >>> [round(number, 4) for number in estimate([0.5, 1.0, 0.0, 0.5])]  # mean +- 3.1824 s / sqrt(4), s = 0.4082
    [0.5, -0.1496, 1.1496]
    """
    if not rewards:
        raise ValueError("there is no reward")
    if all(reward in (0, 1) for reward in rewards):
        return wilson(sum(reward == 1 for reward in rewards), len(rewards))
    if len(rewards) < 2:
        raise ValueError("one reward has no spread")
    mean = math.fsum(rewards) / len(rewards)
    half = t_95(len(rewards) - 1) * statistics.stdev(rewards, mean) / math.sqrt(len(rewards))
    return Estimate(mean, mean - half, mean + half)


def wilson(successes: int, trials: int) -> Estimate:
    """Share of successes with Wilson's score interval, which stays within 0..1 and is never empty.

    (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n)

    >>> [round(number, 4) for number in wilson(10, 10)]
    [1.0, 0.7225, 1.0]
    """
    share, extra = successes / trials, Z_95**2 / trials
    middle = (share + extra / 2) / (1 + extra)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + extra / (4 * trials)) / (1 + extra)
    return Estimate(share, max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share)))


def t_95(freedom: int) -> float:
    """The number t with P(-t <= T <= t) = 0.95 for Student's T with so many degrees of freedom.

    >>> [round(t_95(freedom), 3) for freedom in (1, 2, 3, 10, 63, 5000)]
    [12.706, 4.303, 3.182, 2.228, 1.998, 1.96]
    """
    if freedom > _MANY:  # the first term of its expansion around the normal quantile
        return Z_95 + (Z_95**3 + Z_95) / (4 * freedom)
    low, high = 0.0, 20.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """P(-t <= T <= t), by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
