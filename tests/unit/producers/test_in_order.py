"""in-order: items as they stand."""

from __future__ import annotations

from producers.curricula.in_order import in_order
from producers.curriculum import Draw, Finished, History


def test_items_come_as_they_stand_pass_after_pass_whatever_came_of_them() -> None:
    history = History(10, 1)
    history.saw(0, Finished(0, 1, (1.0,), 3.0))
    assert [in_order(Draw(number=n, num_items=3, seed=n), history) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert in_order(Draw(number=10**9, num_items=None, seed=0), history) == 10**9
