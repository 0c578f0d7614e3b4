"""Planning: which waiting outcomes the next step eats, and which it sets aside because of their age or their weights.

Outcomes are merged by (append time, partition, offset); within a window the oldest version goes first. Age is judged
here, once, against the version current now; a group beyond the bound is set aside whole, with its numbers.
Demonstrations have no age, since no weights made them, and no log-probs: a loss that needs those sets them aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schemas.records import Address, PlanDrop
from schemas.rules.versions import GIVEN

STALE = "stale"
VOID_VERSION = "void-version"
RUN_ENDED = "run-ended"
NO_LOGPROBS = "no-logprobs"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A kept outcome that no plan has named yet."""

    address: Address
    time_ms: int
    """Append time of the outcome."""
    oldest_version: int
    weights: frozenset[tuple[int, int]]
    """(epoch, version) of every kept member's tokens."""
    own: bool
    """Whether its trajectories are the trainer's own (run, policy): only then is age checked."""

    @property
    def given(self) -> bool:
        """Whether some of its tokens were not sampled by any weights: demonstrations."""
        return GIVEN in self.weights

    @property
    def aged(self) -> bool:
        """Whether it has an age that counts."""
        return self.own and not self.given

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the merged order."""
        return self.time_ms, self.address.partition, self.address.offset


class Chosen(NamedTuple):
    """What a plan will name."""

    samples: tuple[Address, ...]
    drops: tuple[PlanDrop, ...]
    max_age: int


def choose(
    waiting: Iterable[Waiting],
    *,
    version: int,
    batch_groups: int,
    max_staleness: int,
    window: int,
    in_lineage: Callable[[int, int], bool],
    takes_given: bool = False,
) -> Chosen:
    """Samples (exactly `batch_groups`, or none while too few wait) and drops of the plan made at `version`.

    `takes_given`: demonstrations may be trained on, because the loss needs no log-probs of whoever made them.

    >>> def group(offset, oldest, time_ms=0):
    ...     return Waiting(Address(0, offset, offset * 10, 4), time_ms, oldest, frozenset({(1, oldest)}), own=True)
    >>> chosen = choose([group(0, 5), group(1, 2), group(2, 4)], version=5, batch_groups=2, max_staleness=2, window=4,
    ...     in_lineage=lambda epoch, version: True)
    >>> [a.offset for a in chosen.samples], [(d.offset, d.reason, d.age) for d in chosen.drops], chosen.max_age
    ([2, 0], [(1, 'stale', 3)], 1)
    """
    fit: list[Waiting] = []
    drops: list[PlanDrop] = []
    for entry in sorted(waiting, key=lambda w: w.order):
        reason, years = _judge(entry, version, max_staleness, in_lineage, takes_given)
        if reason:
            drops.append(PlanDrop(*entry.address, reason, years))
        else:
            fit.append(entry)
    if len(fit) < batch_groups:
        return Chosen((), tuple(drops), -1)
    view = sorted(fit[: max(window, batch_groups)], key=lambda w: (w.oldest_version if w.aged else version, w.order))
    taken = view[:batch_groups]
    max_age = max((version - entry.oldest_version for entry in taken if entry.aged), default=-1)
    return Chosen(tuple(entry.address for entry in taken), tuple(drops), max_age)


def set_aside(waiting: Iterable[Waiting], reason: str = RUN_ENDED) -> Chosen:
    """Everything that still waits becomes a drop: how a run ends."""
    ordered = sorted(waiting, key=lambda w: w.order)
    return Chosen((), tuple(PlanDrop(*entry.address, reason, -1) for entry in ordered), -1)


def _judge(
    entry: Waiting, version: int, max_staleness: int, in_lineage: Callable[[int, int], bool], takes_given: bool
) -> tuple[str, int]:
    """Why an outcome may not be trained on at `version` ("" if it may), and its age (-1 where age does not apply)."""
    if entry.given:
        return ("" if takes_given else NO_LOGPROBS), -1
    if not entry.own:
        return "", -1
    years = version - entry.oldest_version
    if not all(in_lineage(epoch, made) for epoch, made in entry.weights):
        return VOID_VERSION, years
    return (STALE if years > max_staleness else ""), years
