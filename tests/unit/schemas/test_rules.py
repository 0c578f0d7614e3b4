"""Property tests of the pure rules: claims, closing, admission, planning, ledger, lineage, accounting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import Address, Claim, Plan, PlanDrop, Result
from schemas.rules import admission
from schemas.rules.accounting import At, Books, balance
from schemas.rules.claims import Claims
from schemas.rules.closing import Arrival, GroupCloser
from schemas.rules.ledger import Ledger
from schemas.rules.planning import NO_LOGPROBS, STALE, VOID_VERSION, Chosen, Waiting, choose, set_aside
from schemas.rules.versions import GIVEN

CLAIMS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from("abc")), max_size=20)


@given(CLAIMS)
def test_the_first_claim_of_the_greatest_epoch_owns(claims: list[tuple[int, str]]) -> None:
    fold = Claims()
    for epoch, nonce in claims:
        fold.claim(epoch, nonce)
    greatest = max((epoch for epoch, _ in claims), default=0)
    first = next((nonce for epoch, nonce in claims if epoch == greatest), "")
    assert (fold.epoch, fold.nonce) == (greatest, first)


@given(st.integers(0, 10_000))
def test_closing_is_a_function_of_the_log_alone(seed: int) -> None:
    """Each group closes at most once, at its last missing index or its close record; every arrival has one fate."""
    rng = random.Random(seed)
    closer: GroupCloser[int] = GroupCloser()
    firsts: dict[str, dict[int, int]] = {}
    ended: dict[str, int] = {}
    for offset in range(60):
        group, time_ms = f"g{rng.randint(0, 5)}", offset * 10
        if rng.random() < 0.15:
            closed = closer.close(group, offset=offset, time_ms=time_ms)
            assert (closed is not None) == (group in firsts and group not in ended)
        else:
            index = rng.randint(0, 2)
            arrival, closed = closer.add(
                group,
                size=3,
                index=index,
                offset=offset,
                time_ms=time_ms,
                first_request_time_ms=0,
                lifetime_ms=10**6,
                payload=offset,
            )
            if group in ended:
                assert arrival in (Arrival.LATE, Arrival.SUPERSEDED)
            elif index in firsts.get(group, {}):
                assert arrival is Arrival.SUPERSEDED
            else:
                assert arrival is Arrival.JOINED
                firsts.setdefault(group, {})[index] = offset
        if closed:
            assert group not in ended
            ended[group] = offset
            assert {index: at for index, at, _ in closed.members} == firsts[group]
            assert closed.closing_offset == offset
            assert closed.closed_by == ("complete" if len(firsts[group]) == 3 else "close")


def test_what_is_late_by_itself_opens_nothing() -> None:
    closer: GroupCloser[None] = GroupCloser()
    arrival, closed = closer.add(
        "g", size=2, index=0, offset=0, time_ms=101, first_request_time_ms=0, lifetime_ms=100, payload=None
    )
    assert (arrival, closed, closer.oldest_open()) == (Arrival.LATE, None, None)
    assert closer.close("g", offset=1, time_ms=102) is None


@given(st.integers(0, 10_000), st.integers(0, 4), st.integers(1, 5), st.integers(1, 40))
def test_admission_keeps_the_staleness_bound(seed: int, eta: int, batch: int, capacity: int) -> None:
    """Groups that start with the weights asked for, at the latest when planned, are never older than eta when planned.

    Groups are planned in the order of admission here; finishing out of order is what the check at planning is for.
    """
    rng = random.Random(seed)
    planned = 0
    queue: list[int] = []  # oldest version that each admitted group may have started with
    for _ in range(200):
        running = rng.randint(0, len(queue))
        backlog = len(queue) - running
        free = admission.free_groups(
            capacity=capacity, running=running, backlog=backlog, batch_groups=batch, max_staleness=eta
        )
        assert 0 <= free <= capacity
        for _ in range(rng.randint(0, free)):
            target = admission.target_step(steps_planned=planned, running=len(queue), backlog=0, batch_groups=batch)
            least = admission.min_version(target, eta)
            assert least <= planned, "a worker could wait for weights that nothing will make"
            queue.append(rng.randint(least, planned))
        if len(queue) >= batch and rng.random() < 0.7:
            step, queue = queue[:batch], queue[batch:]
            assert all(planned - version <= eta for version in step)
            planned += 1
    assert len(queue) <= (eta + 1) * batch


def waiting(rng: random.Random, count: int) -> list[Waiting]:
    return [
        Waiting(
            Address(rng.randint(0, 1), n, n * 7, 4),
            rng.randint(0, 50),
            oldest := rng.randint(0, 6),
            frozenset({(1, oldest), (rng.randint(1, 2), oldest + 1)}),
            own=rng.random() < 0.9,
        )
        for n in range(count)
    ]


@given(st.integers(0, 100_000), st.integers(0, 30), st.integers(1, 8), st.integers(0, 3))
def test_plans_hold_each_outcome_once_within_the_bound(seed: int, count: int, batch: int, eta: int) -> None:
    rng = random.Random(seed)
    entries = waiting(rng, count)

    def lineage(epoch: int, version: int) -> bool:
        return epoch == 1 or version % 2 == 0

    def plan(order: list[Waiting]) -> object:
        return choose(order, version=6, batch_groups=batch, max_staleness=eta, window=2 * batch, in_lineage=lineage)

    chosen = choose(entries, version=6, batch_groups=batch, max_staleness=eta, window=2 * batch, in_lineage=lineage)
    shuffled = entries[:]
    rng.shuffle(shuffled)
    assert plan(shuffled) == chosen, "the order of reading must not matter"
    named = [a.offset for a in chosen.samples] + [d.offset for d in chosen.drops]
    assert len(set(named)) == len(named)
    assert len(chosen.samples) in (0, batch)
    by_offset = {entry.address.offset: entry for entry in entries}
    for address in chosen.samples:
        entry = by_offset[address.offset]
        assert not entry.own or 6 - entry.oldest_version <= eta
    assert all(by_offset[d.offset].own and d.reason in (STALE, VOID_VERSION) for d in chosen.drops)
    assert len(set_aside(entries).drops) == count


def test_oldest_version_goes_first_within_the_window() -> None:
    entries = [Waiting(Address(0, n, n, 1), n, v, frozenset({(1, v)}), True) for n, v in enumerate([5, 4, 3, 2])]
    chosen = choose(
        entries, version=5, batch_groups=1, max_staleness=5, window=3, in_lineage=lambda epoch, version: True
    )
    assert chosen.samples[0].offset == 2, "offset 3 is older, but behind the window"


def given_group(offset: int, *, own: bool = True) -> Waiting:
    """A demonstration: imported early, read late."""
    return Waiting(Address(0, offset, offset, 1), offset, 0, frozenset({GIVEN}), own)


@pytest.mark.parametrize("own", [True, False])
def test_demonstrations_have_no_age_and_no_logprobs(own: bool) -> None:
    entries = [given_group(n, own=own) for n in range(3)]

    def plan(takes_given: bool) -> Chosen:
        return choose(
            entries, version=40, batch_groups=2, max_staleness=0, window=4,
            in_lineage=lambda epoch, version: epoch > 0, takes_given=takes_given,
        )  # fmt: skip

    assert [a.offset for a in plan(True).samples] == [0, 1] and plan(True).max_age == -1 and not plan(True).drops
    assert [(d.offset, d.reason, d.age) for d in plan(False).drops] == [(n, NO_LOGPROBS, -1) for n in range(3)]
    assert not plan(False).samples


def test_what_the_policy_sampled_goes_before_no_demonstration_of_its_step() -> None:
    """Within a window the oldest version goes first; a demonstration counts as new."""
    sampled = Waiting(Address(0, 9, 9, 1), 9, 38, frozenset({(1, 38)}), True)
    chosen = choose(
        [given_group(0), sampled], version=40, batch_groups=1, max_staleness=4, window=4,
        in_lineage=lambda epoch, version: True, takes_given=True,
    )  # fmt: skip
    assert chosen.samples[0].offset == 9 and chosen.max_age == 2


class Simulation:
    """Trainers that take over from each other at any write; the ledger is the only judge."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log: list[object] = []

    def append(self, record: object) -> None:
        self.log.append(record)

    def fold(self) -> Ledger:
        ledger = Ledger()
        for offset, record in enumerate(self.log):
            ledger.take(offset, record, 1000 + offset)
        return ledger

    def run(self, rounds: int = 40) -> Ledger:
        owners: list[tuple[int, str]] = []
        for number in range(rounds):
            ledger = self.fold()
            if not owners or self.rng.random() < 0.15:
                owner = (ledger.claims.next_epoch, f"n{number}")
                owners.append(owner)
                self.append(Claim(run="r", policy="p", role="train", epoch=owner[0], nonce=owner[1]))
                continue
            epoch, nonce = self.rng.choice(owners[-2:])  # the owner, or the zombie before it
            stale_view = self.rng.random() < 0.2
            step = ledger.steps_done if not stale_view else max(0, ledger.steps_done - 1)
            if ledger.steps_planned == ledger.steps_done or stale_view:
                address = Address(0, number, number if self.rng.random() < 0.9 else 1, 4)
                drops = (PlanDrop(0, number, 1000 + number, 4, STALE, 9),) if self.rng.random() < 0.3 else ()
                self.append(
                    Plan(
                        run="r",
                        policy="p",
                        epoch=epoch,
                        nonce=nonce,
                        step=step,
                        samples=(address,),
                        drops=drops,
                        max_age=0,
                        seed=0,
                        config_digest="",
                    )
                )
            else:
                self.append(
                    Result(run="r", policy="p", epoch=epoch, nonce=nonce, step=step, version=step + 1, digest="d")
                )
        return self.fold()


@given(st.integers(0, 100_000))
def test_ledger_names_each_outcome_once_and_steps_rise(seed: int) -> None:
    ledger = Simulation(seed).run()
    steps = [plan.step for _, plan in ledger.plans]
    assert steps == list(range(len(steps)))
    assert [result.step for result in ledger.results] == list(range(ledger.steps_done))
    assert 0 <= ledger.steps_planned - ledger.steps_done <= 1
    named = [(a.partition, a.closing_offset) for _, plan in ledger.plans for a in plan.samples]
    named += [(d.partition, d.closing_offset) for d in ledger.drops]
    assert len(named) == len(set(named))
    epochs = [plan.epoch for _, plan in ledger.plans]
    assert epochs == sorted(epochs), "a superseded trainer's plan counted"
    for step, result in enumerate(ledger.results):
        assert ledger.lineage.holds(result.epoch, step + 1)
        assert not any(ledger.lineage.holds(older, step + 1) for older in range(result.epoch))


def books() -> Books:
    return Books(
        records={At(0, n) for n in range(8)},
        closes={At(0, 0)},
        late={At(0, 1)},
        superseded={At(0, 2)},
        open_members={At(0, 3)},
        dead_lettered={At(0, 4)},
        dropped={At(0, 5): "zero-spread"},
        awaiting_plan={At(0, 6)},
    )


def test_books_that_close() -> None:
    full = books()
    full.trained[At(0, 7)] = 1
    accounts = balance(full)
    assert accounts.ok
    assert (accounts.produced, accounts.trained, accounts.dropped, accounts.pending) == (7, 1, 1, 2)
    assert accounts.drops_by_reason == {"zero-spread": 1}
    assert accounts.pending_by_reason == {"group open": 1, "awaiting plan": 1}


def test_each_way_of_not_closing_is_found() -> None:
    assert balance(books()).unaccounted == 1, "record 7 is in no set"
    double = books()
    double.trained[At(0, 7)] = 2
    assert balance(double).twice == 1 and not balance(double).ok
    both = books()
    both.trained[At(0, 7)] = 1
    both.late.add(At(0, 7))
    assert not balance(both).ok and "late" in balance(both).findings[0]
    stranger = books()
    stranger.trained[At(0, 7)] = 1
    stranger.trained[At(3, 3)] = 1
    assert balance(stranger).unaccounted == 1
    attempts = books()
    attempts.trained[At(0, 7)] = 1
    attempts.trained_members[("g", 1)] = 2
    assert balance(attempts).twice == 1, "two attempts of one member"
