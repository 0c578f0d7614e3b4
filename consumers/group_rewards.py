"""What a group filter and an estimator see of a group: the numbers of its valid members, in the order of their index.

G = valid members. Two small formulae that several estimators share stand here as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SHAPING_PART = "shaping"
"""Name under which what shaping added stands among the parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRewards:
    """The valid members of one group. Arrays are [G], float64, and refuse to be written to."""

    rewards: Numbers
    """After shaping: what advantages are made of."""
    raw: Numbers
    """As the environment gave them."""
    lengths: Numbers
    """Tokens that may be trained on: the sum of each member's loss mask."""
    parts: Mapping[str, Numbers] = field(default_factory=dict)
    """Named parts of the raw rewards; NaN where a member lacks one. SHAPING_PART is there if shaping is set."""
    size: int
    """Members asked for; above G when some failed, were lost or came late."""

    @classmethod
    def of(
        cls,
        rewards: Sequence[float] | Numbers,
        *,
        raw: Sequence[float] | Numbers | None = None,
        lengths: Sequence[float] | Numbers | None = None,
        parts: Mapping[str, Sequence[float] | Numbers] | None = None,
        size: int | None = None,
    ) -> GroupRewards:
        """A group with these numbers; what is left out: unshaped, all of length 1, no parts, nobody missing.

        >>> GroupRewards.of([1, 0]).raw.tolist()
        [1.0, 0.0]
        """
        given = _fixed(rewards)
        return cls(
            rewards=given,
            raw=given if raw is None else _fixed(raw),
            lengths=_fixed([1.0] * len(given) if lengths is None else lengths),
            parts={name: _fixed(values) for name, values in (parts or {}).items()},
            size=len(given) if size is None else size,
        )


def centred(values: Numbers) -> Numbers:
    """Distances from the mean; exactly 0 where all are equal, and for a lone value.

    The mean of equal numbers is not always that number in floating point, so equality is looked at first.

    >>> centred(np.array([1.0, 0.0, 0.0, 1.0])).tolist(), centred(np.array([0.1] * 3)).tolist()
    ([0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0])
    """
    if not differ(values):
        return np.zeros(len(values))
    distances: Numbers = values - values.mean()
    return distances


def standard_scores(values: Numbers, *, ddof: int, eps: float) -> Numbers:
    """Distances from the mean over (standard deviation + eps); exactly 0 where all are equal, and for a lone value.

    ddof 1 divides the sum of squares by G - 1 (the sample's deviation), ddof 0 by G.

    >>> standard_scores(np.array([1.0, 0.0]), ddof=0, eps=0.0).tolist()  # mean 0.5, deviation 0.5
    [1.0, -1.0]
    """
    if not differ(values):
        return np.zeros(len(values))
    scores: Numbers = (values - values.mean()) / (values.std(ddof=ddof) + eps)
    return scores


def differ(values: Numbers) -> bool:
    """Whether at least two of the values are different."""
    return len(values) > 1 and bool(values.max() != values.min())


def _fixed(values: Sequence[float] | Numbers) -> Numbers:
    """A copy that cannot be written to, so that no component changes what the next one sees."""
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array
