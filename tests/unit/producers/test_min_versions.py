"""Weights that requests wait for: no history of drops and plans makes a step wait for weights that only it would make."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from producers.dispatch_state import DispatchState, Limits
from producers.groups import Group, group_name
from schemas.rules.ending import StopAt


def new_state(batch: int, eta: int, capacity: int) -> DispatchState:
    limits = Limits(
        group_size=1, capacity_groups=capacity, batch_groups=batch, max_staleness=eta, stop_at=StopAt(), reissue_after_s=1.0,
        heartbeat_timeout_s=1.0,
    )  # fmt: skip
    state = DispatchState(limits, 1)
    state.caught_up(0.0)
    return state


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 5), eta=st.integers(0, 4), every=st.integers(1, 5))
def test_a_full_step_can_always_start_with_weights_that_are_there(seed: int, batch: int, eta: int, every: int) -> None:
    """With weights published every k <= eta + 1 steps, enough groups may start to fill the next step."""
    rng, every = random.Random(seed), min(every, eta + 1)
    state = new_state(batch, eta, capacity=(eta + 1) * batch)
    waiting: list[int] = []  # closing offsets of what is kept and not planned
    closing = 0
    for _ in range(120):
        for _ in range(state.admissible()):
            group = Group(state.next_number, 1, min_version=state.next_min_version())
            state.groups[group.name] = group
        published = len(state.ledger.plans) // every * every
        able = [group for group in state.groups.values() if group.min_version <= published]
        assert len(able) + len(waiting) >= batch, "this step waits for weights of a later one"
        event = rng.random()
        if event < 0.6 and able:
            state._end(rng.choice(able).name)
            if rng.random() < 0.7:
                closing += 1
                waiting.append(closing)
                state.backlog[(0, closing)] = None
        elif event < 0.7 and waiting:
            state.backlog.pop((0, waiting.pop(rng.randrange(len(waiting)))))
        elif len(waiting) >= batch:
            for _ in range(batch):
                state.backlog.pop((0, waiting.pop(0)))
            state.ledger.plans.append((0, None))  # type: ignore[arg-type]  # only their number counts here
        assert state.running + len(state.backlog) <= (eta + 1) * batch


@given(st.lists(st.integers(0, 12), max_size=30), st.sets(st.integers(0, 12)))
def test_numbers_are_given_once_and_none_is_left_out(ends: list[int], running: set[int]) -> None:
    state = new_state(4, 1, 8)
    ended: set[int] = set()
    for number in ends:
        state.numbers.end(number)
        ended.add(number)
        assert state.numbers.floor == next(n for n in range(99) if n not in ended)
    for number in running - ended:
        state.groups[group_name(number)] = Group(number, 1)
    assert state.next_number == next(n for n in range(99) if n not in ended | running)
    assert all(state.numbers.is_over(n) == (n in ended) for n in range(20))
    state.numbers.end_all_but(running, 15)
    assert [n for n in range(15) if not state.numbers.is_over(n)] == sorted(running - ended)
