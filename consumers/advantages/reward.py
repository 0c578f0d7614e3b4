"""reward: the reward itself, without a baseline: for demonstrations, and for groups of one."""

from __future__ import annotations

from consumers.group_rewards import GroupRewards, Numbers


def reward(group: GroupRewards) -> Numbers:
    """A_i = R_i, after shaping (REINFORCE without a baseline, Williams 1992).

    With samples of the policy's own its variance is the highest of all. Demonstrations have no group: here a lone one
    counts, as it does nowhere else.

    >>> reward(GroupRewards.of([1.0])).tolist(), reward(GroupRewards.of([0.5, 0.0])).tolist()
    ([1.0], [0.5, 0.0])
    """
    return group.rewards.copy()
