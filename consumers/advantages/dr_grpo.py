"""dr-grpo: distance from the group's mean, not divided by its spread (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from consumers.group_rewards import GroupRewards, Numbers, centred


def dr_grpo(group: GroupRewards) -> Numbers:
    """A_i = R_i - mean. Meant for a loss that divides by a constant length, as the paper does.

    Equal rewards give exactly 0, and so does a lone sample.

    >>> dr_grpo(GroupRewards.of([1.0, 0.0, 0.0, 1.0])).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    return centred(group.rewards)
