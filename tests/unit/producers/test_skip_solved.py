"""skip-solved: what was right again and again rests, for a while."""

from __future__ import annotations

from collections import Counter

import pytest

from producers.curricula.skip_solved import skip_solved
from producers.curriculum import Draw, Finished, History
from producers.task_order import item_at
from schemas.errors import SettingError

NUM_ITEMS = 6


def history(*results: tuple[int, int, tuple[float, ...]]) -> History:
    """Of (number, item, rewards)."""
    found = History(100, 1)
    for number, item, rewards in results:
        found.saw(0, Finished(number, item, rewards, 4.0))
    return found


def chosen(found: History, start: int = 12, count: int = 60, **settings: float) -> Counter[int]:
    draws = [Draw(number=n, num_items=NUM_ITEMS, seed=1) for n in range(start, start + count)]
    return Counter(skip_solved(draw, found, **settings) for draw in draws)  # type: ignore[arg-type]


SOLVED = ((0, 2, (1.0, 1.0)), (5, 2, (1.0, 1.0)))


def test_an_item_solved_twice_rests_and_others_take_its_turn() -> None:
    found = chosen(history(*SOLVED))
    assert found[2] == 0 and set(found) == {0, 1, 3, 4, 5}
    assert found.total() == 60


def test_it_comes_back_after_its_rest() -> None:
    assert chosen(history(*SOLVED), start=5 + 29, count=1, rest_groups=30)[2] == 0
    late = chosen(history(*SOLVED), start=5 + 30, rest_groups=30)
    assert late == Counter(item_at(n, num_items=NUM_ITEMS, seed=1) for n in range(35, 95)), "the shuffled order again"


@pytest.mark.parametrize(
    "results",
    [
        SOLVED[:1],
        (*SOLVED, (7, 2, (1.0, 0.0))),
        ((0, 2, (1.0, 0.9)), (5, 2, (1.0, 1.0))),
        ((0, 2, ()), (5, 2, ())),
    ],
    ids=["once", "failed since", "not all right", "never judged"],
)
def test_nothing_else_makes_it_rest(results: tuple[tuple[int, int, tuple[float, ...]], ...]) -> None:
    assert chosen(history(*results))[2] == 10


def test_older_failures_do_not_matter() -> None:
    assert chosen(history((-1, 2, (0.0,)), *SOLVED))[2] == 0


def test_how_often_and_how_well_are_settings() -> None:
    assert chosen(history(*SOLVED), times=3)[2] == 10
    assert chosen(history((0, 2, (0.8,)), (5, 2, (0.7,))), reward=0.7)[2] == 0


def test_where_everything_rests_the_order_goes_on() -> None:
    found = history(*((2 * item + k, item, (1.0,)) for item in range(NUM_ITEMS) for k in range(2)))
    assert chosen(found, start=12) == Counter({item: 10 for item in range(NUM_ITEMS)})


def test_endless_items_never_rest() -> None:
    assert skip_solved(Draw(number=2, num_items=None, seed=1), history(*SOLVED)) == 2


@pytest.mark.parametrize("settings", [{"times": 0}, {"rest_groups": 0}])
def test_settings_without_sense_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="must be 1 or more"):
        skip_solved(Draw(number=0, num_items=1, seed=0), History(0, 1), **settings)
