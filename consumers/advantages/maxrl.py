"""maxrl: distance from the group's mean in units of that mean (maximum likelihood RL, arXiv 2602.02710)."""

from __future__ import annotations

from consumers.checks import check_not_negative
from consumers.group_rewards import GroupRewards, Numbers, centred


def maxrl(group: GroupRewards, *, eps: float = 1e-6) -> Numbers:
    """A_i = (R_i - mean) / (mean + eps), for rewards of 0 or more.

    With rewards of 0 and 1 the mean is the pass rate, so rare successes weigh most: with K of G right, each right one
    gets (G - K) / K. Equal rewards (all wrong included) and a lone sample give exactly 0. A negative reward raises, and
    its group is dropped: a mean near or below 0 would turn or blow up every sign.

    >>> maxrl(GroupRewards.of([1.0, 0.0, 0.0, 0.0])).round(4).tolist()  # mean 0.25
    [3.0, -1.0, -1.0, -1.0]
    """
    check_not_negative("maxrl", "eps", eps)
    if group.rewards.min() < 0:
        raise ValueError(f"maxrl needs rewards of 0 or more, got {group.rewards.min()}; shift or clip them first")
    advantages = centred(group.rewards)
    if advantages.any():
        advantages /= group.rewards.mean() + eps
    return advantages
