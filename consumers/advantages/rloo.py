"""rloo: distance from the mean of the other members (leave one out; arXiv 2402.14740)."""

from __future__ import annotations

from consumers.group_rewards import GroupRewards, Numbers, centred


def rloo(group: GroupRewards) -> Numbers:
    """A_i = R_i - sum over j != i of R_j / (G - 1) = G / (G - 1) (R_i - mean).

    A lone sample has no others and gives exactly 0, never its raw reward; equal rewards give 0 too.

    >>> rloo(GroupRewards.of([1.0, 0.0, 0.5])).tolist()  # the others' means: 0.25, 0.75, 0.5
    [0.75, -0.75, 0.0]
    """
    num_members = len(group.rewards)
    return centred(group.rewards) * (num_members / max(num_members - 1, 1))
