"""grpo: distance from the group's mean in standard deviations of the group (arXiv 2402.03300)."""

from __future__ import annotations

from consumers.checks import check_not_negative
from consumers.group_rewards import GroupRewards, Numbers, centred, standard_scores
from schemas.errors import SettingError

_DDOF = {"sample": 1, "population": 0}


def grpo(group: GroupRewards, *, std: str = "sample", eps: float = 1e-6) -> Numbers:
    """A_i = (R_i - mean) / (std + eps).

    `std`: "sample" (ddof 1, as most libraries), "population" (ddof 0) or "none" (no division: dr-grpo). Equal rewards
    give exactly 0, and so does a lone sample: its standard deviation is not a number, and adding eps would not help.

    >>> grpo(GroupRewards.of([1.0, 0.0])).round(4).tolist()  # mean 0.5, std 0.7071
    [0.7071, -0.7071]
    >>> grpo(GroupRewards.of([1.0, 0.0]), std="population").round(4).tolist()  # std 0.5
    [1.0, -1.0]
    >>> grpo(GroupRewards.of([0.7])).tolist()
    [0.0]
    """
    check_not_negative("grpo", "eps", eps)
    if std == "none":
        return centred(group.rewards)
    if std not in _DDOF:
        raise SettingError(f"grpo: std is {std!r}; it must be 'sample', 'population' or 'none'")
    return standard_scores(group.rewards, ddof=_DDOF[std], eps=eps)
