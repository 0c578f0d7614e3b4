"""zero-spread: a group whose members all earned the same has no advantage and is dropped (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from consumers.checks import check_not_negative
from consumers.group_rewards import GroupRewards


def zero_spread(group: GroupRewards, *, tol: float = 1e-6, raw: bool = False) -> str | None:
    """Return "zero-spread" when max - min <= tol, of the shaped rewards or (`raw`) of those before shaping.

    The two differ where shaping tells equal answers apart: a group that is right throughout keeps a little signal from
    a length penalty. DAPO drops it, which is `raw = true`.

    >>> zero_spread(GroupRewards.of([0.5, 0.5])), zero_spread(GroupRewards.of([0.5, 1.0]))
    ('zero-spread', None)
    >>> shaped = GroupRewards.of([1.0, 0.8], raw=[1.0, 1.0])
    >>> zero_spread(shaped), zero_spread(shaped, raw=True)
    (None, 'zero-spread')
    """
    check_not_negative("zero-spread", "tol", tol)
    rewards = group.raw if raw else group.rewards
    return "zero-spread" if rewards.max() - rewards.min() <= tol else None
