"""Accounting: every offset of `trajectories` is exactly one of trained, dropped, dead-lettered, late, superseded, close record, pending.

Each set is computed on its own, by id, from a different place on the log; what they claim twice, or what none claims,
fails the audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class At(NamedTuple):
    """A record of `trajectories`."""

    partition: int
    offset: int


@dataclass(slots=True)
class Books:
    """The sets, each filled from its own source."""

    records: set[At] = field(default_factory=set)
    """Everything that stands on `trajectories` (from the topic)."""
    closes: set[At] = field(default_factory=set)
    """Close records (from the topic)."""
    late: set[At] = field(default_factory=set)
    superseded: set[At] = field(default_factory=set)
    """By the closing rule, applied to the topic afresh."""
    open_members: set[At] = field(default_factory=set)
    """Members of groups that have not closed (by the closing rule)."""
    awaiting_outcome: set[At] = field(default_factory=set)
    """Members of groups that closed behind the last outcome of their partition."""
    dead_lettered: set[At] = field(default_factory=set)
    """Origins named on `dead-letters`."""
    dropped: dict[At, str] = field(default_factory=dict)
    """Members that an effective outcome or an effective plan set aside, with the reason."""
    awaiting_plan: set[At] = field(default_factory=set)
    """Kept members of effective outcomes that no plan has named, or whose plan has no result yet."""
    trained: Counter[At] = field(default_factory=Counter)
    """Members of effective outcomes in effective plans that have a result, with how often."""
    trained_members: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The same by (group, index): two attempts of one member must not both be trained."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """The balance of a policy's log."""

    produced: int
    trained: int
    dropped: int
    dead_lettered: int
    late: int
    superseded: int
    pending: int
    unaccounted: int
    twice: int
    drops_by_reason: Mapping[str, int]
    pending_by_reason: Mapping[str, int]
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is lost and nothing counted twice."""
        return self.unaccounted == 0 and self.twice == 0 and not self.findings


def balance(books: Books) -> Accounts:
    """Hold the sets against each other.

    >>> books = Books(records={At(0, 0), At(0, 1), At(0, 2)}, closes={At(0, 2)}, late={At(0, 1)})
    >>> accounts = balance(books)
    >>> accounts.produced, accounts.unaccounted, accounts.ok
    (2, 1, False)
    """
    sets: dict[str, set[At]] = {
        "trained": set(books.trained),
        "dropped": set(books.dropped),
        "dead-lettered": books.dead_lettered,
        "late": books.late,
        "superseded": books.superseded,
        "close record": books.closes,
        "group open": books.open_members,
        "awaiting outcome": books.awaiting_outcome,
        "awaiting plan": books.awaiting_plan,
    }
    claims: Counter[At] = Counter()
    for members in sets.values():
        claims.update(members)
    unaccounted = books.records - claims.keys()
    overlapping = {at for at, count in claims.items() if count > 1}
    strangers = claims.keys() - books.records
    twice = sum(1 for count in books.trained.values() if count > 1)
    twice += sum(1 for count in books.trained_members.values() if count > 1)
    findings = [
        *_name("in no set", unaccounted),
        *_name("in several sets", overlapping, lambda at: "+".join(k for k, v in sets.items() if at in v)),
        *_name("claimed but not on the log", strangers),
        *_name("trained more than once", {at for at, count in books.trained.items() if count > 1}),
    ]
    pending = {name: len(sets[name]) for name in ("group open", "awaiting outcome", "awaiting plan")}
    return Accounts(
        produced=len(books.records - books.closes),
        trained=len(sets["trained"]),
        dropped=len(sets["dropped"]),
        dead_lettered=len(books.dead_lettered),
        late=len(books.late),
        superseded=len(books.superseded),
        pending=sum(pending.values()),
        unaccounted=len(unaccounted) + len(strangers) + len(overlapping),
        twice=twice,
        drops_by_reason=dict(Counter(books.dropped.values())),
        pending_by_reason={name: count for name, count in pending.items() if count},
        findings=tuple(findings),
    )


def _name(what: str, found: Iterable[At], say: object = None) -> list[str]:
    """One line per kind of finding, with the first few addresses."""
    ordered = sorted(found)
    if not ordered:
        return []
    detail = [f"{at.partition}:{at.offset}" + (f" ({say(at)})" if callable(say) else "") for at in ordered[:5]]
    return [f"{len(ordered)} records {what}: {', '.join(detail)}{', ...' if len(ordered) > 5 else ''}"]
