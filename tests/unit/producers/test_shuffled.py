"""shuffled: every item once a pass."""

from __future__ import annotations

from producers.curricula.shuffled import shuffled
from producers.curriculum import Draw, History


def test_each_pass_holds_every_item_once_in_an_order_of_its_own() -> None:
    items = [shuffled(Draw(number=n, num_items=20, seed=3), History(0, 1)) for n in range(60)]
    passes = [items[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != list(range(20))
    assert items != [shuffled(Draw(number=n, num_items=20, seed=4), History(0, 1)) for n in range(60)]
