"""Admission: AReaL's answers where its rule and ours must agree, and what must hold in every history where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.rules.admission import free_groups, min_version, remaining_groups, target_step

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "admission.json").read_text("utf-8"))
COUNTS = st.integers(0, 200)


class Books:
    """Groups of a run that admission alone holds back."""

    def __init__(self, batch: int, eta: int, capacity: int, planned: int = 0, steps: int = 0) -> None:
        self.batch, self.eta, self.capacity, self.planned, self.steps = batch, eta, capacity, planned, steps
        self.running = self.backlog = 0

    @property
    def free(self) -> int:
        free = free_groups(
            capacity=self.capacity,
            running=self.running,
            backlog=self.backlog,
            batch_groups=self.batch,
            max_staleness=self.eta,
        )
        remaining = remaining_groups(
            steps=self.steps,
            steps_planned=self.planned,
            running=self.running,
            backlog=self.backlog,
            batch_groups=self.batch,
        )
        return free if remaining is None else min(free, remaining)

    def do(self, event: str) -> None:
        """ "drop" is what AReaL has no word for: a group that was kept, and is set aside for its age when planning."""
        if event == "submit":
            self.running += 1
        elif event == "accept":
            self.running, self.backlog = self.running - 1, self.backlog + 1
        elif event == "reject":
            self.running -= 1
        elif event == "drop":
            self.backlog -= 1
        else:
            self.planned, self.backlog = self.planned + 1, self.backlog - self.batch


@pytest.mark.parametrize("history", FROZEN["histories"], ids=lambda h: f"batch {h['batch']}, eta {h['eta']}")
def test_areal_admits_as_many_where_nothing_is_dropped_after_it_was_accepted(history: dict[str, Any]) -> None:
    books = Books(history["batch"], history["eta"], history["capacity"], history["first_version"])
    assert books.free == max(0, history["answers"][0])
    for event, answer in zip(history["events"], history["answers"][1:], strict=True):
        books.do(event)
        assert books.free == max(0, answer)


def test_the_frozen_histories_reach_both_limits_and_every_event() -> None:
    seen = {event for history in FROZEN["histories"] for event in history["events"]}
    assert seen == {"submit", "accept", "reject", "step"}
    assert any(history["first_version"] for history in FROZEN["histories"])
    assert any(0 in history["answers"] for history in FROZEN["histories"])
    bound_by = set()
    for history in FROZEN["histories"]:
        books = Books(history["batch"], history["eta"], history["capacity"], history["first_version"])
        for event in history["events"]:
            books.do(event)
            slots = books.capacity - books.running
            room = (books.eta + 1) * books.batch - books.running - books.backlog
            bound_by.add("capacity" if slots < room else "staleness")
    assert bound_by == {"capacity", "staleness"}


@given(
    batch=st.integers(1, 8), eta=st.integers(0, 4), capacity=st.integers(1, 40), steps=st.integers(0, 20),
    choices=st.lists(st.integers(0, 10**6), max_size=200),
)  # fmt: skip
def test_no_history_exceeds_a_bound_or_stands_still(
    batch: int, eta: int, capacity: int, steps: int, choices: list[int]
) -> None:
    """Any order of asking, finishing, dropping and planning, drops after acceptance included."""
    books = Books(batch, eta, capacity, steps=steps)
    for choice in choices:
        able = ["submit"] * (books.free > 0) + ["accept", "reject"] * (books.running > 0)
        able += ["drop"] * (books.backlog > 0)
        able += ["step"] * (books.backlog >= batch and (not steps or books.planned < steps))
        if not able:
            break
        books.do(able[choice % len(able)])
        assert 0 <= books.free <= capacity
        assert books.running <= capacity
        assert books.running + books.backlog <= (eta + 1) * batch
        if steps:
            assert books.planned * batch + books.running + books.backlog <= steps * batch, "asked for in vain"
        if books.running == 0 and books.backlog < batch and not (steps and books.planned == steps):
            assert books.free > 0, "nothing runs, too little waits, and nothing may be asked for"


@given(capacity=COUNTS, running=COUNTS, backlog=COUNTS, batch=st.integers(1, 50), eta=st.integers(0, 9))
def test_more_that_runs_or_waits_never_frees_anything(
    capacity: int, running: int, backlog: int, batch: int, eta: int
) -> None:
    def free(**changes: int) -> int:
        now = {
            "capacity": capacity,
            "running": running,
            "backlog": backlog,
            "batch_groups": batch,
            "max_staleness": eta,
        }
        return free_groups(**{**now, **changes})

    assert free() >= max(free(running=running + 1), free(backlog=backlog + 1), 0)
    assert free() <= min(free(capacity=capacity + 1), free(max_staleness=eta + 1), free(batch_groups=batch + 1))
    assert free() - free(running=running + free()) == free(), "what is admitted is used up"


@given(planned=COUNTS, ahead=COUNTS, batch=st.integers(1, 50), eta=st.integers(0, 9))
def test_what_starts_with_the_least_weights_allowed_is_within_the_bound_at_its_target(
    planned: int, ahead: int, batch: int, eta: int
) -> None:
    target = target_step(steps_planned=planned, running=ahead, backlog=0, batch_groups=batch)
    least = min_version(target, eta)
    assert target - least <= eta and 0 <= least <= target
    if ahead < (eta + 1) * batch:
        assert least <= planned, "what admission lets through never waits for weights of its own step"
