"""What was left out of training, and whether that is biased by length or difficulty: from the log alone.

Every trajectory that arrived is trained, waiting, or left out for a reason; members of outcomes carry their lengths, and
records that came too late are read where they stand. Sampled tokens measure length; the mean reward of a trajectory's
group, and the share of it that was solved, measure how hard its item was for the policy of that time.

A difference of means is given with its 95 % interval: normal, with the standard error clustered by group (the members of a
group share an item, so they are no independent observations). For trajectories i with values y in groups g, on sides d
(left out) and t (trained), with n_d, n_t trajectories: SE² = G/(G-1) · Σ_g (Σ_{i∈g∩d}(y_i - ȳ_d)/n_d - Σ_{i∈g∩t}(y_i - ȳ_t)/n_t)².
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infra.arrivals import arrivals, dead_letters
from infra.audit import Audit, Source
from infra.log import Log
from schemas.names import topic
from schemas.records import KEPT, Outcome, Role, Trajectory
from schemas.rules.accounting import At
from schemas.rules.closing import Arrival, GroupCloser

TRAINED, WAITING = "trained", "waiting"
DEAD = "dead-lettered"
REPEAT = str(Arrival.SUPERSEDED)
"""Another attempt of the same member counts: such a one is shown, and is no loss."""
MIN_GROUPS = 20
"""Groups on each side below which nothing is said: the interval rests on many."""
_Z_95 = 1.959963984540054


class Seen(NamedTuple):
    """A trajectory: what became of it, and what may bias that. None where it is not known."""

    fate: str
    group: str
    task: str
    num_sampled: int
    group_reward: float | None
    group_solved: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of those left out minus mean of those trained, with its 95 % interval; `says` is "" where too few groups are there."""

    difference: float
    low: float
    high: float
    num_groups: int
    """The smaller of the two sides' numbers of groups."""

    @property
    def enough(self) -> bool:
        """Whether there are groups enough to say anything."""
        return self.num_groups >= MIN_GROUPS

    @property
    def direction(self) -> int:
        """1 or -1 where the interval leaves out zero, else 0."""
        if not self.enough or self.low <= 0 <= self.high:
            return 0
        return 1 if self.low > 0 else -1


@dataclass(frozen=True, slots=True)
class Side:
    """Those with one fate, in figures; None where none of them has the figure."""

    fate: str
    trajectories: int
    groups: int
    mean_sampled: float | None = None
    median_sampled: float | None = None
    mean_group_reward: float | None = None
    mean_group_solved: float | None = None
    length: Difference | None = None
    reward: Difference | None = None
    """Against those trained."""


@dataclass(frozen=True, slots=True)
class Drops:
    """What was left out of one policy's training."""

    run: str
    policy: str
    settled: int
    """Trajectories whose fate is known: all but those still open or waiting, and but repeats."""
    trained: Side
    left_out: Side
    """All reasons together, but for repeats; those that could not be read count, without figures."""
    reasons: tuple[Side, ...]
    tasks: tuple[tuple[str, int, int], ...]
    """(task, trained, left out)"""
    missing_members: int
    """Members that were asked for and never came before their group closed: their lengths are known to nobody."""


def drops(log: Log, found: Audit, source: Source, *, max_tokens: int, solved: float) -> Drops:
    """Sort everything that arrived, and compare. `solved`: a reward of at least this counts as solved."""
    outcomes = [*(outcome for _, outcome in found.trained_outcomes), *found.waiting_outcomes, *found.dropped_outcomes]
    rewards = {outcome.group: group_rewards(outcome, solved) for outcome in outcomes}
    seen = [*_of_outcomes(found, rewards), *_too_late(log, found, source, outcomes, rewards, max_tokens)]
    missing = sum(max(0, outcome.group_size - len(outcome.members)) for outcome in outcomes)
    return summary(found.run, found.policy, seen, found.accounts.dead_lettered, missing)


def summary(run: str, policy: str, seen: Sequence[Seen], dead: int, missing: int) -> Drops:
    """The comparison itself. Pure."""
    by_fate: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        by_fate[each.fate].append(each)
    trained = by_fate.pop(TRAINED, [])
    by_fate.pop(WAITING, None)
    left_out = [each for fate, those in by_fate.items() if fate != REPEAT for each in those]
    reasons = [_side(fate, those, trained) for fate, those in by_fate.items()]
    if dead:
        reasons.append(Side(DEAD, dead, 0))
    whole = _side("left out", left_out, trained, more=dead)
    return Drops(
        run=run,
        policy=policy,
        settled=len(trained) + len(left_out) + dead,
        trained=_side(TRAINED, trained, ()),
        left_out=whole,
        reasons=tuple(sorted(reasons, key=lambda side: (-side.trajectories, side.fate))),
        tasks=_tasks(trained, left_out),
        missing_members=missing,
    )


def compare(left: Iterable[tuple[str, float]], right: Iterable[tuple[str, float]]) -> Difference | None:
    """The difference of two means of (group, value), clustered by group; None where a side is empty.

    >>> compare([("a", 3.0), ("b", 5.0)], [("c", 1.0), ("d", 1.0)]).difference
    3.0
    """
    sides = [list(left), list(right)]
    if not all(sides):
        return None
    means = [math.fsum(value for _, value in side) / len(side) for side in sides]
    influence: dict[str, float] = defaultdict(float)
    for side, mean, sign in zip(sides, means, (1, -1), strict=True):
        for group, value in side:
            influence[group] += sign * (value - mean) / len(side)
    count = len(influence)
    error = math.sqrt(math.fsum(value**2 for value in influence.values()) * count / max(1, count - 1))
    difference = means[0] - means[1]
    smaller = min(len({group for group, _ in side}) for side in sides)
    return Difference(difference, difference - _Z_95 * error, difference + _Z_95 * error, smaller)


def group_rewards(outcome: Outcome, solved: float) -> tuple[float | None, float | None]:
    """Mean reward of a group's members that have one, and the share of them that is solved."""
    rewards = [member.reward for member in outcome.members if member.reward is not None]
    if not rewards:
        return None, None
    return math.fsum(rewards) / len(rewards), sum(reward >= solved for reward in rewards) / len(rewards)


_Rewards = dict[str, tuple[float | None, float | None]]


def _of_outcomes(found: Audit, rewards: _Rewards) -> Iterable[Seen]:
    """Members of effective outcomes."""
    aside = {(drop.partition, drop.closing_offset): drop.reason for drop in found.ledger.drops}
    fates = [
        *((TRAINED, outcome) for _, outcome in found.trained_outcomes),
        *((WAITING, outcome) for outcome in found.waiting_outcomes),
        *((aside.get((o.partition, o.closing_offset), o.disposition), o) for o in found.dropped_outcomes),
    ]
    for fate, outcome in fates:
        for member in outcome.members:
            its = fate if member.disposition == KEPT else member.disposition
            yield Seen(its, outcome.group, outcome.task, member.num_sampled, *rewards[outcome.group])


def _too_late(
    log: Log, found: Audit, source: Source, outcomes: Iterable[Outcome], rewards: _Rewards, max_tokens: int
) -> Iterable[Seen]:
    """Records that no outcome names since their group had closed, or their time was over."""
    used = {At(outcome.partition, member.offset) for outcome in outcomes for member in outcome.members}
    name = topic(source.run, source.policy, "trajectories")
    letters = (letter for _, letter in dead_letters(log, found.run, found.policy) if letter is not None)
    dead = {At(letter.partition, letter.offset) for letter in letters if letter.topic == name} - used
    for partition, bounds in sorted(log.bounds(name).items()):
        closer: GroupCloser[None] = GroupCloser()
        for _, record, arrival in arrivals(
            log, source, partition, bounds, dead=dead, max_tokens=max_tokens, closer=closer
        ):
            if isinstance(record, Trajectory) and arrival in (Arrival.LATE, Arrival.SUPERSEDED):
                sampled = sum(segment.count for segment in record.segments if segment.role is Role.SAMPLED)
                its = rewards.get(record.group, (None, None))
                yield Seen(str(arrival), record.group, record.task, sampled, *its)


def _side(fate: str, those: Sequence[Seen], trained: Sequence[Seen], more: int = 0) -> Side:
    if not those:
        return Side(fate, more, 0)
    lengths = sorted(each.num_sampled for each in those)
    middle = (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
    return Side(
        fate=fate,
        trajectories=len(those) + more,
        groups=len({each.group for each in those}),
        mean_sampled=sum(lengths) / len(lengths),
        median_sampled=middle,
        mean_group_reward=_mean([each.group_reward for each in those]),
        mean_group_solved=_mean([each.group_solved for each in those]),
        length=compare(_lengths(those), _lengths(trained)),
        reward=compare(_rewards_of(those), _rewards_of(trained)),
    )


def _lengths(those: Iterable[Seen]) -> Iterable[tuple[str, float]]:
    return ((each.group, float(each.num_sampled)) for each in those)


def _rewards_of(those: Iterable[Seen]) -> Iterable[tuple[str, float]]:
    return ((each.group, each.group_reward) for each in those if each.group_reward is not None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _tasks(trained: Iterable[Seen], left_out: Iterable[Seen]) -> tuple[tuple[str, int, int], ...]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for column, those in enumerate((trained, left_out)):
        for each in those:
            counts[each.task][column] += 1
    return tuple((task, *pair) for task, pair in sorted(counts.items()))  # type: ignore[misc]
