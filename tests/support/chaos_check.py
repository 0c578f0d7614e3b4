"""The chaos test's checker: reads the topics, replays them alone and undisturbed, and holds everything against the journal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from consumers.components import Recipe
from consumers.pipeline import Route, judge, make_outcome
from infra.audit import audit
from infra.log import Envelope, Log, Place
from infra.ownership import read_all, read_record
from schemas.codec import decode
from schemas.errors import RecordError
from schemas.names import topic
from schemas.records import Close, DeadLetter, Outcome, Trajectory
from schemas.rules.chain import NONE, Chain
from schemas.rules.closing import ClosedGroup, GroupCloser
from schemas.validate import check_trajectory
from support.chaos_plan import Item

MAX_TOKENS = 4_000_000


@dataclass
class Expected:
    """What a policy's trajectories must become, and the topic itself."""

    outcomes: list[Outcome] = field(default_factory=list)
    poison: dict[tuple[int, int], Envelope] = field(default_factory=dict)
    records: dict[tuple[int, int], Envelope] = field(default_factory=dict)


def read_topic(log: Log, name: str) -> list[Envelope]:
    """Everything on a topic, partition after partition."""
    return [e for p, bounds in sorted(log.bounds(name).items()) for e in read_all(log, Place(name, p), bounds)]


def replay(log: Log, run: str, policy: str, recipe: Recipe) -> Expected:
    """The rules alone, applied to the topic in one go: no processor, no position, no restart."""
    expected = Expected()
    route = Route(run=run, policy=policy, source_run=run, source_policy=policy)
    closers: dict[int, GroupCloser[Trajectory]] = {}
    last: dict[int, int] = {}

    def ended(closed: ClosedGroup[Trajectory] | None, partition: int) -> None:
        if closed is not None:
            members = [member for *_, member in closed.members]
            judgement = judge(members, closed.size, recipe)
            previous = last.get(partition, NONE)
            last[partition] = closed.closing_offset
            expected.outcomes.append(
                make_outcome(closed, members, judgement, route=route, partition=partition, previous=previous)
            )

    for envelope in read_topic(log, topic(run, policy, "trajectories")):
        partition, offset, time_ms = envelope.partition, envelope.offset, envelope.time_ms
        expected.records[partition, offset] = envelope
        closer = closers.setdefault(partition, GroupCloser())
        record = _sound(envelope, run, policy)
        if record is None:
            expected.poison[partition, offset] = envelope
        elif isinstance(record, Close):
            ended(closer.close(record.group, offset=offset, time_ms=time_ms), partition)
        else:
            _, closed = closer.add(
                record.group, size=record.group_size, index=record.index, offset=offset, time_ms=time_ms,
                first_request_time_ms=record.first_request_time_ms, lifetime_ms=record.lifetime_ms, payload=record,
            )  # fmt: skip
            ended(closed, partition)
    return expected


def _sound(envelope: Envelope, run: str, policy: str) -> Trajectory | Close | None:
    try:
        record = decode(envelope.value)
        if isinstance(record, Trajectory):
            check_trajectory(record, run=run, policy=policy, partition=envelope.partition, max_tokens=MAX_TOKENS)
            return record
    except RecordError:
        return None
    return record if isinstance(record, Close) and record.policy == policy else None


def effective(log: Log, run: str, policy: str, *, checks_chain: bool = True) -> tuple[list[Outcome], int]:
    """Outcomes that count, and how many stand on the topic. Without the chain every one would count: a planted bug."""
    chains: dict[int, Chain] = {}
    taken, stand = [], 0
    for envelope in read_topic(log, topic(run, policy, "samples")):
        record = read_record(envelope)
        assert isinstance(record, Outcome)
        stand += 1
        chain = chains.setdefault(envelope.partition, Chain())
        if chain.take(record.previous, record.closing_offset) or not checks_chain:
            taken.append(record)
    return taken, stand


def letters(log: Log, run: str, policy: str) -> list[DeadLetter]:
    """Everything on the dead-letter topic."""
    found = [read_record(envelope) for envelope in read_topic(log, topic(run, policy, "dead-letters"))]
    assert all(isinstance(record, DeadLetter) for record in found)
    return found  # type: ignore[return-value]


def is_drained(log: Log, run: str, policy: str, expected: Expected) -> bool:
    """Whether every outcome and every dead letter that must come has come."""
    origins = {(letter.partition, letter.offset) for letter in letters(log, run, policy)}
    if not expected.poison.keys() <= origins:
        return False
    return len(effective(log, run, policy)[0]) >= len(expected.outcomes)


def check_policy(
    log: Log, run: str, policy: str, expected: Expected, counts: Counter[str], *, checks_chain: bool = True
) -> list[str]:
    """What is wrong with a policy's outcomes, dead letters and accounts."""
    found: list[str] = []
    outcomes, stand = effective(log, run, policy, checks_chain=checks_chain)
    counts["repeated outcomes"] += stand - len(outcomes)
    doubled = [
        group for group, count in Counter((o.partition, o.closing_offset) for o in outcomes).items() if count > 1
    ]
    found += [f"{policy}: {len(doubled)} effects are doubled, first {doubled[0]}"] if doubled else []
    by_place = {(o.partition, o.closing_offset): o for o in outcomes}
    wanted = {(o.partition, o.closing_offset): o for o in expected.outcomes}
    for what, places in (
        ("lost", wanted.keys() - by_place.keys()),
        ("made from nothing", by_place.keys() - wanted.keys()),
        ("different", {place for place in wanted.keys() & by_place.keys() if wanted[place] != by_place[place]}),
    ):
        found += [f"{policy}: {len(places)} outcomes are {what}, first {min(places)}"] if places else []
    found += _check_letters(letters(log, run, policy), policy, expected, counts)
    accounts = audit(log, run, policy, max_tokens=MAX_TOKENS).accounts
    found += [f"{policy}: audit: {finding}" for finding in accounts.findings[:3]]
    if not accounts.ok or accounts.pending_by_reason.keys() - {"awaiting plan"}:
        found.append(f"{policy}: the accounts do not close: {accounts.pending_by_reason}, {accounts.unaccounted} lost")
    counts["outcomes"] += len(outcomes)
    counts["dead letters"] += len(expected.poison)
    counts["superseded"] += accounts.superseded
    counts["late"] += accounts.late
    counts["dropped"] += accounts.dropped
    counts["awaiting plan"] += accounts.pending_by_reason.get("awaiting plan", 0)
    return found


def _check_letters(found: list[DeadLetter], policy: str, expected: Expected, counts: Counter[str]) -> list[str]:
    """Exactly the poison, byte for byte, each by its origin; repeats are harmless."""
    origins = {(letter.partition, letter.offset) for letter in found}
    counts["repeated dead letters"] += len(found) - len(origins)
    wrong: list[str] = []
    if missing := expected.poison.keys() - origins:
        wrong.append(f"{policy}: {len(missing)} dead letters are lost, first {min(missing)}")
    if stray := origins - expected.poison.keys():
        wrong.append(f"{policy}: {len(stray)} dead letters are of sound records, first {min(stray)}")
    for letter in found:
        origin = expected.poison.get((letter.partition, letter.offset))
        if origin is None:
            continue
        want = (origin.topic, origin.time_ms, origin.key, origin.value or b"")
        if (letter.topic, letter.time_ms, letter.key, letter.value or b"") != want:
            wrong.append(f"{policy}: the dead letter of {letter.partition}@{letter.offset} is not its original")
    return wrong


def check_journal(journal: Path, plan: list[Item], by_policy: dict[str, Expected], counts: Counter[str]) -> list[str]:
    """Every acknowledged send stands where its acknowledgement said, as it was sent; everything there was sent."""
    found: list[str] = []
    acked: set[int] = set()
    sent: Counter[int] = Counter()
    for line in journal.read_text().splitlines():
        kind, number, *at = json.loads(line)
        if kind == "s":
            sent[number] += 1
            continue
        acked.add(number)
        item = plan[number]
        envelope = by_policy[item.policy].records.get((at[0], at[1]))
        if envelope is None or (envelope.value, envelope.key) != (item.value, item.key):
            found.append(f"send {number} was acknowledged at {at}, and is not there")
    if len(acked) != len(plan):
        found.append(f"{len(plan) - len(acked)} sends of the plan were never acknowledged")
    stand: Counter[bytes | None] = Counter(
        e.value for expected in by_policy.values() for e in expected.records.values()
    )
    want: Counter[bytes | None] = Counter()
    for number, times in sent.items():
        want[plan[number].value] += times
    if stand - want:
        found.append(f"{(stand - want).total()} records stand on the log more often than they were sent")
    counts["acknowledged"] += len(acked)
    counts["sent again"] += sent.total() - len(sent)
    return found
