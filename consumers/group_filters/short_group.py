"""short-group: a group of which too many members failed, were lost or came late is dropped."""

from __future__ import annotations

from consumers.group_rewards import GroupRewards
from schemas.errors import SettingError


def short_group(group: GroupRewards, *, share: float) -> str | None:
    """Return "short-group" when fewer than `share` of the members asked for have a valid reward.

    A baseline of few members is noisy, and who is missing is rarely chance (the long ones time out). `min_members`
    must allow short groups first; it counts members, this one is relative to the size.

    >>> short_group(GroupRewards.of([1, 0, 1], size=4), share=0.75), short_group(GroupRewards.of([1, 0], size=4), share=0.75)
    (None, 'short-group')
    """
    if not 0 < share <= 1:
        raise SettingError(f"short-group: share is {share}; it must be above 0 and at most 1")
    return "short-group" if len(group.rewards) < share * group.size else None
