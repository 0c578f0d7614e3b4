"""opo: distance from the group's mean weighted by length, the baseline of least variance (OPO, arXiv 2505.23585)."""

from __future__ import annotations

import numpy as np

from consumers.group_rewards import GroupRewards, Numbers, differ


def opo(group: GroupRewards) -> Numbers:
    """A_i = R_i - sum_j L_j R_j / sum_j L_j, with L the tokens of a member that may be trained on.

    The gradient of a long answer is noisier, about in proportion to its length, so its reward counts more in the
    baseline. Made for strictly on-policy training (max_staleness 0). Equal lengths give dr-grpo. Equal rewards and a
    lone sample give exactly 0, and so does a group in which no token is trained on.

    >>> opo(GroupRewards.of([1.0, 0.0], lengths=[1, 3])).tolist()  # baseline (1 * 1 + 3 * 0) / 4
    [0.75, -0.25]
    """
    total = group.lengths.sum()
    if not differ(group.rewards) or total == 0:
        return np.zeros(len(group.rewards))
    advantages: Numbers = group.rewards - (group.lengths * group.rewards).sum() / total
    return advantages
