"""Work beside a loop: its result, its errors, and what goes wrong in the loop meanwhile."""

from __future__ import annotations

import threading

import pytest

from schemas.errors import BrokerError
from trainers.beside import beside


def test_the_loop_goes_on_while_the_work_lasts() -> None:
    over, turns = threading.Event(), []

    def meanwhile() -> None:
        turns.append(threading.current_thread())
        if len(turns) == 3:
            over.set()

    assert beside(lambda: over.wait(30), meanwhile, every_s=0.001) is True
    assert len(turns) >= 3 and set(turns) == {threading.current_thread()}


def test_the_work_s_error_is_raised_here() -> None:
    def work() -> None:
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        beside(work, lambda: None)


def test_trouble_in_the_loop_waits_for_the_work_and_is_raised_then() -> None:
    over, done, calls = threading.Event(), [], []

    def work() -> None:
        over.wait(30)
        done.append(True)

    def meanwhile() -> None:
        calls.append(True)
        over.set()
        raise BrokerError("away")

    with pytest.raises(BrokerError, match="away"):
        beside(work, meanwhile, every_s=0.001)
    assert (done, calls) == ([True], [True]), "the work is whole, and the loop is not asked again"
