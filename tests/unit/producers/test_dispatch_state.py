"""The dispatcher's fold: whatever order topics are read in, the same state; deadlines, re-issue, admission."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from producers.dispatch_state import DispatchState, Limits
from producers.groups import Worker
from schemas.records import Address, Claim, Plan, PlanDrop
from schemas.rules.ending import StopAt
from support.samples import close, dropped_member, member, outcome, request, trajectory

LIFETIME_MS = 10_000


def state(*, live: bool = True, **changes: Any) -> DispatchState:
    limits = Limits(
        group_size=2, capacity_groups=4, batch_groups=2, max_staleness=1, stop_at=StopAt(), reissue_after_s=3.0,
        heartbeat_timeout_s=2.0,
    )  # fmt: skip
    found = DispatchState(replace(limits, **changes), partitions=2)
    if live:
        found.caught_up(0.0)
    return found


def ask(
    found: DispatchState, number: int, index: int, *, time_ms: int = 1000, now_s: float = 0.0, **changes: int | str
) -> None:
    record = request(
        group=f"g{number:08d}", group_size=2, index=index, partition=number % 2, lifetime_ms=LIFETIME_MS, min_version=0,
        session="s", **changes,
    )  # fmt: skip
    found.saw_request(record, time_ms, now_s)


def arrive(found: DispatchState, number: int, index: int, *, time_ms: int = 2000) -> None:
    record = trajectory(
        group=f"g{number:08d}", group_size=2, index=index, partition=number % 2, first_request_time_ms=1000,
        lifetime_ms=LIFETIME_MS,
    )  # fmt: skip
    found.saw_trajectory(record, time_ms)


def end(found: DispatchState, number: int, closing: int, previous: int = -1, kept: bool = True) -> None:
    record = outcome(
        group=f"g{number:08d}", partition=number % 2, closing_offset=closing, previous=previous,
        disposition="kept" if kept else "zero-spread", members=(member(),) if kept else (dropped_member(),),
    )  # fmt: skip
    found.saw_outcome(number % 2, record)


def worker(session: str, capacity: int = 8, seen_s: float = 0.0, **changes: Any) -> Worker:
    return Worker(f"w-{session}", session, 0, capacity, seen_s, **changes)


def test_any_order_between_topics_gives_the_same_state() -> None:
    """Requests, trajectories and outcomes stand on different topics, so a restart reads them in any order."""
    events: list[Callable[[DispatchState], None]] = [
        lambda s: ask(s, 0, 0),
        lambda s: ask(s, 0, 1),
        lambda s: arrive(s, 0, 0),
        lambda s: end(s, 2, 7),
        lambda s: ask(s, 2, 0),
    ]
    for order in itertools.permutations(events):
        found = state(live=False)
        for event in order:
            event(found)
        (group,) = found.groups.values()
        assert {index: asked.arrived for index, asked in group.asked.items()} == {0: True, 1: False}
        assert not found.open_strays()
        found.caught_up(0.0)
        assert (found.running, len(found.backlog), found.next_number) == (1, 1, 1), "number 1 was left out"


def test_groups_are_counted_until_their_outcome_and_then_until_their_plan() -> None:
    found = state()
    ask(found, 0, 0)
    ask(found, 0, 1)
    arrive(found, 0, 0)
    arrive(found, 0, 1)
    assert (found.running, len(found.backlog)) == (1, 0), "complete, but no outcome yet"
    end(found, 0, 5)
    assert (found.running, len(found.backlog)) == (0, 1)
    end(found, 0, 5)
    assert (found.kept, len(found.backlog)) == (1, 1), "a repeat has no effect"
    found.saw_step(0, Claim(run="demo", policy="main", role="train", epoch=1, nonce="a"), 1000)
    plan = Plan(
        run="demo", policy="main", epoch=1, nonce="a", step=0, samples=(), drops=(PlanDrop(0, 0, 5, 1, "stale", 2),),
        max_age=-1, seed=0, config_digest="",
    )  # fmt: skip
    found.saw_step(1, replace(plan, nonce="b"), 1000)
    assert len(found.backlog) == 1, "a void plan takes nothing"
    found.saw_step(1, plan, 1000)
    assert len(found.backlog) == 0
    assert found.ledger.steps_planned == 0


def test_an_outcome_read_after_the_plan_that_names_it_does_not_wait() -> None:
    found = state()
    found.saw_step(0, Claim(run="demo", policy="main", role="train", epoch=1, nonce="a"), 1000)
    found.saw_step(1, Plan(
        run="demo", policy="main", epoch=1, nonce="a", step=0, samples=(Address(0, 0, 5, 1),), drops=(), max_age=0,
        seed=0, config_digest="",
    ), 1000)  # fmt: skip
    end(found, 0, 5)
    assert len(found.backlog) == 0


def test_outcomes_in_a_wrong_partition_or_of_none_are_passed_over() -> None:
    found = state()
    found.saw_outcome(1, outcome(partition=0, previous=-1))
    found.saw_outcome(9, outcome(partition=9, previous=-1))
    assert found.kept == 0


def test_admission_is_bounded_by_capacity_staleness_and_the_steps_that_are_left() -> None:
    assert state().admissible() == 4
    assert state(capacity_groups=3).admissible() == 3
    assert state(stop_at=StopAt(steps=1)).admissible() == 2
    found = state()
    for number in range(3):
        ask(found, number, 0)
    assert found.admissible() == 1


def test_min_versions_follow_the_step_that_will_eat_a_group() -> None:
    found = state(max_staleness=1)
    given = []
    for number in range(4):
        given.append(found.next_min_version())
        ask(found, number, 0)
    assert given == [0, 0, 0, 0], "step 0 and step 1 may both eat version 0"


def test_what_replaces_a_dropped_group_takes_its_place() -> None:
    """Asked for as the last of all, it would wait for weights that its own step makes, where versions are published
    every second step: a deadlock."""
    found = state(max_staleness=1)
    found.saw_step(0, Claim(run="demo", policy="main", role="train", epoch=1, nonce="a"), 1000)
    for step in range(3):
        plan = Plan(
            run="demo", policy="main", epoch=1, nonce="a", step=step, samples=(Address(1, step, 1000 + step, 1),), drops=(),
            max_age=0, seed=0, config_digest="",
        )  # fmt: skip
        found.ledger.plans.append((step, plan))
    end(found, 0, 5)
    wanted = []
    for number in range(1, 4):
        wanted.append(found.next_min_version())
        found.saw_request(
            request(group=f"g{number:08d}", group_size=2, index=0, partition=number % 2, min_version=wanted[-1]),
            1000,
            0.0,
        )
    assert wanted == [2, 3, 3]
    end(found, 1, 9, kept=False)
    assert found.next_min_version() == 2


def test_a_lost_member_is_asked_for_once_more_and_then_no_more() -> None:
    found = state()
    found.saw_worker(worker("s"), left=False)
    ask(found, 0, 0)
    ask(found, 0, 1)
    arrive(found, 0, 1)
    assert found.overdue(now_s=2.0) == []
    assert [(group.number, index) for group, index in found.overdue(now_s=3.5)] == [(0, 0)]
    ask(found, 0, 0, attempt=1, first_request_time_ms=1000, now_s=3.5, time_ms=4500)
    assert found.groups["g00000000"].asked[0].first_request_time_ms == 1000
    assert found.overdue(now_s=9.0) == []


def test_members_of_a_worker_that_left_or_fell_silent_are_overdue_at_once() -> None:
    found = state()
    found.saw_worker(worker("s"), left=False)
    ask(found, 0, 0)
    assert found.overdue(now_s=0.5) == []
    assert [gone.session for gone in found.drop_silent(now_s=2.5)] == ["s"]
    assert len(found.overdue(now_s=2.5)) == 1
    found.saw_worker(worker("s"), left=False)
    found.saw_worker(Worker("w-s", "t", 0, 8, 0.0), left=False)
    assert set(found.workers) == {"t"}, "a fresh session of the same name"


def test_groups_expire_a_lifetime_after_their_youngest_first_request() -> None:
    found = state()
    ask(found, 0, 0, now_s=0.0)
    assert found.expired(now_s=50.0) == [], "a member was never asked for"
    ask(found, 0, 1, now_s=5.0, time_ms=6000)
    assert found.expired(now_s=14.0) == []
    assert [group.number for group in found.expired(now_s=15.5)] == [0]


def test_a_close_record_ends_a_group_without_members_only_when_none_can_come_in_time() -> None:
    found = state()
    ask(found, 0, 0)
    ask(found, 0, 1)
    record = close(group="g00000000", partition=0)
    found.saw_close(record, time_ms=5000)
    assert found.running == 1 and not found.groups["g00000000"].closing, "it closed nothing; members may still come"
    found.saw_close(record, time_ms=1000 + LIFETIME_MS + 1)
    assert (found.running, found.void_groups) == (0, 1)
    arrive(found, 0, 0, time_ms=2000)
    assert not found.open_strays()


def test_a_close_record_behind_a_member_leaves_the_group_to_its_outcome() -> None:
    found = state()
    ask(found, 0, 0)
    ask(found, 0, 1)
    arrive(found, 0, 0)
    found.saw_close(close(group="g00000000", partition=0), time_ms=90_000)
    assert found.running == 1 and found.groups["g00000000"].closing
    assert found.expired(now_s=1e6) == [] and found.overdue(now_s=1e6) == []
    end(found, 0, 5, kept=False)
    assert (found.running, found.dropped) == (0, 1)


def test_a_group_that_nobody_validly_asked_for_is_known_as_stray_until_it_ends() -> None:
    found = state()
    arrive(found, 4, 1)
    assert [name for name, _ in found.open_strays()] == ["g00000004"]
    found.numbers.raise_floor(4)
    assert found.next_number == 5, "its number is taken"
    found.saw_close(close(group="g00000004", partition=0), time_ms=2500)
    assert found.open_strays() == []
    end(found, 4, 5, kept=False)
    assert found.strays == {}


def test_late_trajectories_open_nothing() -> None:
    found = state()
    ask(found, 0, 0)
    arrive(found, 0, 0, time_ms=1000 + LIFETIME_MS + 1)
    arrive(found, 6, 0, time_ms=1000 + LIFETIME_MS + 1)
    assert not found.groups["g00000000"].opened and not found.strays


def test_ages_after_a_restart_come_from_append_times() -> None:
    found = state()
    found.saw_worker(worker("old", seen_s=100.0, seen_ms=1000), left=False)
    found.saw_worker(worker("new", seen_s=100.0, seen_ms=8900), left=False)
    ask(found, 0, 0, now_s=100.0)
    ask(found, 0, 1, now_s=100.0)
    found.saw_time(9000)
    found.caught_up(now_s=100.0)
    assert found.groups["g00000000"].asked[0].first_s == 92.0
    assert [gone.session for gone in found.drop_silent(now_s=100.0)] == ["old"]


def test_workers_are_chosen_by_load_and_others_are_preferred() -> None:
    found = state()
    assert found.choose_worker(2) is None
    for session in ("a", "b"):
        found.saw_worker(worker(session, capacity=2), left=False)
    found.workers["a"].outstanding = 1
    assert found.choose_worker(2).session == "b"  # type: ignore[union-attr]
    assert found.choose_worker(1, avoid="b").session == "a"  # type: ignore[union-attr]
    found.workers["a"].outstanding = found.workers["b"].outstanding = 3
    assert found.choose_worker(2) is None, "full"
    assert found.choose_worker(1) is not None


def test_a_run_that_ends_by_tokens_or_hours_is_fed_as_one_without_end_until_the_log_says_that_it_has_ended() -> None:
    for stop_at in (StopAt(tokens=300), StopAt(hours=1.0)):
        found = state(stop_at=stop_at)
        assert (found.ended, found.admissible()) == (False, 4)
        found.saw_step(0, Claim(run="demo", policy="main", role="train", epoch=1, nonce="a"), 1000)
        end(found, 0, 5)
        plan = Plan(
            run="demo", policy="main", epoch=1, nonce="a", step=0, samples=(Address(0, 0, 5, 1),), drops=(), max_age=0,
            seed=0, config_digest="", num_tokens=300,
        )  # fmt: skip
        found.saw_step(1, replace(plan, nonce="b"), 1000 + 3_600_000)
        assert (found.ended, found.admissible()) == (False, 3), "a void plan ends nothing"
        found.saw_step(2, plan, 1000 + 3_600_000)
        assert (found.ended, found.admissible()) == (True, 0)


def test_an_ended_run_closes_what_is_open_and_asks_for_nothing_more() -> None:
    found = state(stop_at=StopAt(hours=1.0))
    ask(found, 0, 0)
    arrive(found, 0, 0)
    found.saw_step(0, Claim(run="demo", policy="main", role="train", epoch=1, nonce="a"), 1000)
    nothing = Plan(
        run="demo", policy="main", epoch=1, nonce="a", step=0, samples=(), drops=(), max_age=-1, seed=0, config_digest="",
    )  # fmt: skip
    found.saw_step(1, nothing, 1000 + 3_600_000)
    assert found.ended and found.admissible() == 0 and [group.number for group in found.open_groups()] == [0]
