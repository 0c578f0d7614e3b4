"""Components as a user would bring them, good and bad ones."""

from __future__ import annotations

import threading

from consumers.group_rewards import GroupRewards, Numbers
from schemas.records import Trajectory


def raw(group: GroupRewards) -> Numbers:
    """The rewards themselves: not relative to the group."""
    return group.rewards


def raises(group: GroupRewards) -> Numbers:
    """A bug that shows for some groups only."""
    rewards = group.rewards
    if len(rewards) > 1 and rewards[0] > rewards[1]:
        raise IndexError("a bug")
    centred: Numbers = rewards - rewards.mean()
    return centred


def not_finite(group: GroupRewards) -> Numbers:
    """Divides by nothing."""
    return group.rewards / 0.0


def one_number(group: GroupRewards) -> float:
    """Not one for each member."""
    return float(group.rewards.mean())


def writes(group: GroupRewards) -> Numbers:
    """Changes what the next component would see."""
    group.rewards[:] = 0.0
    return group.rewards


def says_kept(trajectory: Trajectory) -> str:
    """A reason that would read as its opposite."""
    return "kept"


def odd_seeds(trajectory: Trajectory, *, remainder: int = 1) -> str | None:
    """A filter of one's own, with a setting."""
    return "odd-seed" if trajectory.seed % 2 == remainder else None


def best_is_rare(group: GroupRewards, *, most: int) -> str | None:
    """A group filter of one's own: drops a group in which more than `most` reach its best reward."""
    return "too-many-best" if int((group.rewards == group.rewards.max()).sum()) > most else None


def above_best_other(group: GroupRewards, *, scale: float = 1.0) -> Numbers:
    """An estimator of one's own: distance from the best of the others."""
    rewards = group.rewards
    others = [max(float(r) for j, r in enumerate(rewards) if j != i) for i in range(len(rewards))]
    distances: Numbers = scale * (rewards - others)
    return distances


def bonus(trajectory: Trajectory, reward: float, *, each: float) -> float:
    """Shaping of one's own: something for every turn."""
    return reward + each * sum(segment.role == "sampled" for segment in trajectory.segments)


def no_number(trajectory: Trajectory, reward: float) -> float:
    """Shaping that divides by nothing."""
    return reward * float("inf")


class Slow:
    """How often the slow component was entered, and until when it stays there."""

    def __init__(self) -> None:
        self.entered, self.hold = threading.Event(), threading.Event()
        self.times = 0

    def clear(self) -> None:
        """As before its first call."""
        self.entered.clear()
        self.times = 0


SLOW = Slow()


def slow_once(group: GroupRewards) -> Numbers:
    """The first group takes until `SLOW.hold` is set, at most 30 s."""
    if not SLOW.entered.is_set():
        SLOW.entered.set()
        SLOW.times += 1
        SLOW.hold.wait(30)
    centred: Numbers = group.rewards - group.rewards.mean()
    return centred
