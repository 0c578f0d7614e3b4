"""gdpo: every part of the reward standardised in the group by itself, then summed (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from consumers.checks import check_coefficients, check_not_negative
from consumers.group_rewards import SHAPING_PART, GroupRewards, Numbers, standard_scores


def gdpo(group: GroupRewards, *, parts: dict[str, float] | None = None, eps: float = 1e-6) -> Numbers:
    """A_i = sum over parts k of c_k (R_ki - mean_k) / (std_k + eps), with the sample's standard deviation (ddof 1).

    `parts` gives the coefficients c_k by the name of a reward part; left out, every part counts once. What shaping
    added to the rewards is a part of its own, "shaping", and counts once unless named. Standardising before summing
    keeps a part of small spread from drowning in one of large spread. A part that is equal in all members gives exactly
    0, and so does a lone sample. A part that a member lacks raises, and the group is dropped: a missing measurement is
    not a 0. This is the paper's group step; its last one whitens over the batch and is the trainer's.

    >>> both = GroupRewards.of([1.0, 10.0], parts={"format": [1, 0], "score": [0, 10]})
    >>> gdpo(both, parts={"format": 1.0, "score": 2.0}).round(4).tolist()  # 0.7071 - 2 * 0.7071
    [-0.7071, 0.7071]
    """
    check_not_negative("gdpo", "eps", eps)
    check_coefficients("gdpo", parts or {})
    total = np.zeros(len(group.rewards))
    if len(total) < 2:
        return total
    for name, coefficient in _coefficients(group, parts or {}).items():
        total += coefficient * standard_scores(_part(group, name), ddof=1, eps=eps)
    return total


def _coefficients(group: GroupRewards, given: Mapping[str, float]) -> dict[str, float]:
    if given:
        return {**({SHAPING_PART: 1.0} if SHAPING_PART in group.parts else {}), **given}
    if not group.parts.keys() - {SHAPING_PART}:
        raise ValueError("gdpo needs reward parts, and this environment gives none")
    return dict.fromkeys(sorted(group.parts), 1.0)


def _part(group: GroupRewards, name: str) -> Numbers:
    try:
        values = group.parts[name]
    except KeyError:
        raise ValueError(f"gdpo: no member has the reward part {name!r}; there are {sorted(group.parts)}") from None
    if not np.isfinite(values).all():
        raise ValueError(f"gdpo: some members lack the reward part {name!r}")
    return values
