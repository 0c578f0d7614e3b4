"""Where a run ends: by steps, tokens or hours, from what counts on `steps`, and the same for every reader."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from schemas.records import Address, Plan
from schemas.rules import ending
from schemas.rules.ending import StopAt, run_ended
from schemas.rules.ledger import Ledger
from support.samples import claim, plan, result

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000


def step(number: int, num_tokens: int = 100, epoch: int = 1) -> Plan:
    return plan(
        epoch=epoch, nonce=f"n{epoch}", step=number, samples=(Address(0, number, number * 10, 2),), drops=(),
        num_tokens=num_tokens,
    )  # fmt: skip


def nothing(number: int, epoch: int = 1) -> Plan:
    return replace(step(number, 0, epoch), samples=())


class Steps:
    """Records of `steps`, each appended some hours after the first."""

    def __init__(self) -> None:
        self.ledger, self._offset = Ledger(), 0

    def append(self, record: object, hours: float = 0.0) -> bool:
        self._offset += 1
        return self.ledger.take(self._offset, record, START_MS + round(hours * HOUR_MS))

    def claim(self, epoch: int = 1, hours: float = 0.0) -> None:
        self.append(claim(epoch=epoch, nonce=f"n{epoch}"), hours)

    def done(self, number: int, hours: float = 0.0, epoch: int = 1) -> None:
        assert self.append(step(number, epoch=epoch), hours)
        assert self.append(result(epoch=epoch, nonce=f"n{epoch}", step=number, version=number + 1), hours)


def test_examples() -> None:
    found = doctest.testmod(ending)
    assert found.attempted and not found.failed


@pytest.mark.parametrize(
    ("stop_at", "why"),
    [
        (StopAt(), ""),
        (StopAt(steps=4, tokens=301, hours=1.5), ""),
        (StopAt(steps=3, tokens=301, hours=1.5), "steps"),
        (StopAt(steps=4, tokens=300, hours=1.5), "tokens"),
        (StopAt(steps=4, tokens=301, hours=1.0), "hours"),
        (StopAt(hours=0.25), "hours"),
    ],
)
def test_the_limit_that_is_reached_first_ends_it(stop_at: StopAt, why: str) -> None:
    assert run_ended(stop_at, steps=3, tokens=300, lasted_ms=HOUR_MS) == why


def test_nothing_has_ended_before_the_first_plan() -> None:
    found = Steps()
    assert found.ledger.ended(StopAt(1, 1, 1e-9)) == ""
    found.claim()
    assert found.ledger.ended(StopAt(1, 1, 1e-9)) == ""


def test_tokens_are_those_of_plans_that_count() -> None:
    found = Steps()
    found.claim()
    found.done(0)
    assert not found.append(step(0)) and not found.append(step(1, epoch=9))
    assert found.ledger.tokens_planned == 100
    found.claim(epoch=2)
    assert not found.append(step(1, epoch=1)), "a zombie's"
    found.done(1, epoch=2)
    assert found.ledger.tokens_planned == 200
    assert [found.ledger.ended(StopAt(tokens=limit)) for limit in (200, 201)] == ["tokens", ""]


def test_hours_go_from_the_first_claim_to_the_newest_plan_that_counts() -> None:
    found, two = Steps(), StopAt(hours=2.0)
    found.claim()
    found.done(0, hours=1.0)
    found.claim(epoch=2, hours=3.0)
    assert found.ledger.ended(two) == "", "a claim is no plan"
    assert not found.append(nothing(1, epoch=1), 3.0)
    assert found.ledger.ended(two) == "", "nor is a zombie's, which is void"
    assert found.ledger.ended(two, START_MS + 2 * HOUR_MS) == "hours", "as it would be with a plan at that time"
    found.done(1, hours=3.0, epoch=2)
    assert found.ledger.ended(two) == "hours"


def test_a_plan_that_names_nothing_tells_the_time_and_takes_no_step() -> None:
    found = Steps()
    found.claim()
    found.done(0)
    assert found.append(nothing(1), 2.0)
    assert found.ledger.ended(StopAt(hours=2.0)) == "hours"
    assert (found.ledger.steps_planned, found.ledger.steps_done, found.ledger.void) == (1, 1, 0)


def test_time_that_goes_back_on_the_log_does_not_begin_an_ended_run_again() -> None:
    found = Steps()
    found.claim()
    found.append(nothing(0), 2.0)
    found.append(nothing(0), 1.0)
    assert found.ledger.ended(StopAt(hours=2.0)) == "hours"


def test_after_the_end_plans_go_on_counting_so_that_a_limit_can_be_raised() -> None:
    found = Steps()
    found.claim()
    for number in range(3):
        found.done(number, hours=number)
    assert found.ledger.ended(StopAt(1, 100, 1.0)) == "steps" and found.ledger.steps_done == 3
    assert found.ledger.ended(StopAt(4, 400, 3.0)) == ""
