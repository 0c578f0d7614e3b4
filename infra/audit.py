"""The audit: reads a policy's topics from the log and accounts for every record of `trajectories`.

Knows the topics and the rules of `schemas.rules`, nothing of any daemon's memory. Each set of the books is filled from
its own source; `schemas.rules.accounting` holds them against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from infra.log import Bounds, Log, Place
from infra.ownership import read_all, read_record
from infra.planted import planted
from infra.weights.announce import Heads, fold
from schemas.errors import RecordError
from schemas.names import topic
from schemas.records import KEPT, Address, Announcement, Close, DeadLetter, Outcome, Record, Trajectory
from schemas.rules.accounting import Accounts, At, Books, balance
from schemas.rules.chain import Chain
from schemas.rules.closing import Arrival, ClosedGroup, GroupCloser
from schemas.rules.ledger import Ledger
from schemas.rules.versions import is_given
from schemas.validate import check_trajectory


class Source(NamedTuple):
    """Where the trajectories of a policy stand: its own topic, or another run's (replay)."""

    run: str
    policy: str


@dataclass(slots=True)
class Audit:
    """What the log of one policy says."""

    run: str
    policy: str
    accounts: Accounts
    ledger: Ledger
    versions_published: int
    trained_tokens: Counter[tuple[int, int]]
    """Trained tokens by (epoch, version) of the weights that made them."""
    trained_outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    """(step, outcome), in the order of training."""
    dropped_outcomes: list[Outcome] = field(default_factory=list)
    waiting_outcomes: list[Outcome] = field(default_factory=list)
    """Kept, and not trained yet."""

    @property
    def max_staleness_seen(self) -> int:
        """Greatest age that any step trained on, from its outcomes' own versions; -1 where age does not apply."""
        own = [
            (step, outcome)
            for step, outcome in self.trained_outcomes
            if (outcome.source_run, outcome.source_policy) == (self.run, self.policy)
            and not any(is_given(member.versions) for member in outcome.members)
        ]
        return max((step - outcome.oldest_version for step, outcome in own), default=-1)


def audit(log: Log, run: str, policy: str, *, max_tokens: int, source: Source | None = None) -> Audit:
    """Read everything up to the present ends and balance the books. `max_tokens`: longest sound trajectory."""
    source = source or Source(run, policy)
    # Later stages first: what a plan names is then on the samples read after it, and so on up the stream.
    ledger = _read_ledger(log, topic(run, policy, "steps"))
    outcomes = _read_outcomes(log, topic(run, policy, "samples"))
    books = Books()
    # An upgraded processor may read again, and use, what an older one could not: then its outcome counts, not the letter.
    used = {At(p, member.offset) for p, chain in outcomes.items() for _, outcome in chain for member in outcome.members}
    books.dead_lettered = _read_dead_letters(log, run, policy, source) - used
    last = {partition: chain[-1][1].closing_offset if chain else -1 for partition, chain in outcomes.items()}
    written = {(p, outcome.closing_offset) for p, chain in outcomes.items() for _, outcome in chain}
    _read_trajectories(log, source, books, last, written, max_tokens)
    result = Audit(run, policy, balance(Books()), ledger, _count_versions(log, run, policy), Counter())
    steps: dict[tuple[int, int], list[int]] = {}
    for step, address in ledger.trained():
        steps.setdefault((address.partition, address.closing_offset), []).append(step)
    aside = {(drop.partition, drop.closing_offset): drop.reason for drop in ledger.drops}
    for partition, chain in outcomes.items():
        for _, outcome in chain:
            key = (partition, outcome.closing_offset)
            _enter_outcome(books, result, outcome, steps.get(key, []), aside.get(key))
    result.trained_outcomes.sort(key=lambda pair: pair[0])
    accounts = balance(books)
    result.accounts = replace(accounts, findings=(*accounts.findings, *_misnamed(ledger, outcomes)))
    return result


def _misnamed(ledger: Ledger, outcomes: dict[int, list[tuple[int, Outcome]]]) -> list[str]:
    """What plans name and `samples` does not hold: the ledger was read first, so it stood there before."""
    kept = {
        (partition, outcome.closing_offset): sum(member.disposition == KEPT for member in outcome.members)
        for partition, chain in outcomes.items()
        for _, outcome in chain
        if outcome.kept
    }
    named = [a for _, plan in ledger.plans for a in plan.samples] + [Address(*drop[:4]) for drop in ledger.drops]
    wrong = [a for a in named if kept.get((a.partition, a.closing_offset)) != a.num_members]
    where = ", ".join(f"{a.partition}:{a.closing_offset}" for a in wrong[:5])
    return [f"{len(wrong)} outcomes named by plans are not on samples as named: {where}"] if wrong else []


def _topic(log: Log, name: str) -> Iterator[tuple[int, Bounds]]:
    yield from sorted(log.bounds(name).items())


def _read_ledger(log: Log, name: str) -> Ledger:
    ledger = Ledger()
    for partition, bounds in _topic(log, name):
        for envelope in read_all(log, Place(name, partition), bounds):
            ledger.take(envelope.offset, read_record(envelope), envelope.time_ms)
    return ledger


def _read_outcomes(log: Log, name: str) -> dict[int, list[tuple[int, Outcome]]]:
    """Effective outcomes by partition, each with its offset."""
    found: dict[int, list[tuple[int, Outcome]]] = {}
    for partition, bounds in _topic(log, name):
        chain, taken = Chain(), []
        for envelope in read_all(log, Place(name, partition), bounds):
            record = read_record(envelope)
            if not isinstance(record, Outcome) or record.partition != partition:
                continue
            if chain.take(record.previous, record.closing_offset):
                taken.append((envelope.offset, record))
        found[partition] = taken
    if planted("lose-outcome"):
        longest = max(found.values(), key=len)
        del longest[len(longest) // 2]
    return found


def _read_dead_letters(log: Log, run: str, policy: str, source: Source) -> set[At]:
    name, origin = topic(run, policy, "dead-letters"), topic(source.run, source.policy, "trajectories")
    return {
        At(record.partition, record.offset)
        for partition, bounds in _topic(log, name)
        for envelope in read_all(log, Place(name, partition), bounds)
        if isinstance(record := read_record(envelope), DeadLetter) and record.topic == origin
    }


def _count_versions(log: Log, run: str, policy: str) -> int:
    """Announced versions that count. Compaction may have removed old ones: then as many as the head says at least."""
    name = topic(run, policy, "weights")
    heads, seen = Heads(run, policy), set()
    for partition, bounds in _topic(log, name):
        for envelope in read_all(log, Place(name, partition), bounds):
            record = read_record(envelope)
            if record is None:
                continue
            heads = fold(heads, record)
            if isinstance(record, Announcement) and heads.head and heads.head.name == (record.epoch, record.version):
                seen.add(record.version)
    return len(seen)


def _read_trajectories(
    log: Log, source: Source, books: Books, last: dict[int, int], written: set[tuple[int, int]], max_tokens: int
) -> None:
    name = topic(source.run, source.policy, "trajectories")
    for partition, bounds in _topic(log, name):
        closer: GroupCloser[None] = GroupCloser()

        def ended(closed: ClosedGroup[None] | None, partition: int = partition) -> None:
            # Behind the last outcome a closed group waits for its own; before it, a missing outcome is a loss.
            if closed and (partition, closed.closing_offset) not in written and closed.closing_offset > last[partition]:
                books.awaiting_outcome.update(At(partition, offset) for _, offset, _ in closed.members)

        for envelope in read_all(log, Place(name, partition), bounds):
            at = At(partition, envelope.offset)
            books.records.add(at)
            if at in books.dead_lettered:
                continue  # its processor passed over it, even where this version could read it
            record = read_record(envelope)
            if isinstance(record, Close) and (record.run, record.policy, record.partition) == (*source, partition):
                books.closes.add(at)
                ended(closer.close(record.group, offset=envelope.offset, time_ms=envelope.time_ms))
            elif isinstance(record, Trajectory) and _sound(record, source, partition, max_tokens):
                _enter_trajectory(books, closer, ended, at, envelope.time_ms, record)
            elif envelope.offset > last[partition]:
                books.awaiting_outcome.add(at)  # unreadable, and the processor has not come to it yet
        books.open_members.update(At(partition, offset) for _, _, offset, _ in closer.open_members())


def _enter_trajectory(
    books: Books,
    closer: GroupCloser[None],
    ended: Callable[[ClosedGroup[None] | None], None],
    at: At,
    time_ms: int,
    record: Trajectory,
) -> None:
    arrival, closed = closer.add(
        record.group,
        size=record.group_size,
        index=record.index,
        offset=at.offset,
        time_ms=time_ms,
        first_request_time_ms=record.first_request_time_ms,
        lifetime_ms=record.lifetime_ms,
        payload=None,
    )
    if arrival is Arrival.LATE:
        books.late.add(at)
    elif arrival is Arrival.SUPERSEDED:
        books.superseded.add(at)
    ended(closed)


def _sound(record: Record, source: Source, partition: int, max_tokens: int) -> bool:
    assert isinstance(record, Trajectory)
    try:
        check_trajectory(record, run=source.run, policy=source.policy, partition=partition, max_tokens=max_tokens)
    except RecordError:
        return False
    return True


def _enter_outcome(books: Books, result: Audit, outcome: Outcome, steps: list[int], aside: str | None) -> None:
    """The members of an effective outcome go into exactly one of dropped, awaiting plan, trained.

    `steps`: those that ate it, with a result; `aside`: why a plan set it aside, if one did.
    """
    for member in outcome.members:
        at = At(outcome.partition, member.offset)
        if not outcome.kept or member.disposition != KEPT:
            books.dropped[at] = member.disposition if member.disposition != KEPT else outcome.disposition
        elif aside is not None:
            books.dropped[at] = aside
        elif not steps:
            books.awaiting_plan.add(at)
        else:
            books.trained[at] += len(steps)
            books.trained_members[(outcome.group, member.index)] += len(steps)
            for run in member.versions:
                result.trained_tokens[(run.epoch, run.version)] += run.count
    if outcome.kept and steps:
        result.trained_outcomes.append((steps[0], outcome))
    elif not outcome.kept or aside is not None:
        result.dropped_outcomes.append(outcome)
    else:
        result.waiting_outcomes.append(outcome)
