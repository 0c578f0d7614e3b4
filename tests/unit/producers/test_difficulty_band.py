"""difficulty-band: mostly what is neither too easy nor too hard."""

from __future__ import annotations

from collections import Counter

import pytest

from producers.curricula.difficulty_band import difficulty_band
from producers.curriculum import Draw, Finished, History
from producers.task_order import item_at
from schemas.errors import SettingError

NUM_ITEMS = 8


def history(**means: float | None) -> History:
    """Of i<item>=mean reward; None: no member was judged."""
    found = History(100, 1)
    for number, (name, mean) in enumerate(means.items()):
        found.saw(0, Finished(number, int(name[1:]), () if mean is None else (mean,), 4.0))
    return found


def chosen(found: History, count: int = 400, **settings: float) -> list[int]:
    draws = [Draw(number=n, num_items=NUM_ITEMS, seed=1) for n in range(10, 10 + count)]
    return [difficulty_band(draw, found, **settings) for draw in draws]  # type: ignore[arg-type]


def test_known_items_within_the_band_are_preferred_alike() -> None:
    counts = Counter(chosen(history(i0=0.0, i1=0.2, i2=0.5, i3=0.8, i4=1.0, i5=None), explore=0.0))
    assert set(counts) == {1, 2, 3}, "both ends belong to it"
    assert min(counts.values()) > 100


def test_exploring_goes_on_with_the_order() -> None:
    order = [item_at(n, num_items=NUM_ITEMS, seed=1) for n in range(10, 410)]
    found = chosen(history(i2=0.5), explore=0.3)
    assert all(item in (2, wanted) for item, wanted in zip(found, order, strict=True))
    strangers = sum(item != 2 for item in found)
    assert 0.3 * 7 / 8 * 400 - 40 < strangers < 0.3 * 7 / 8 * 400 + 40
    assert set(found) == set(range(NUM_ITEMS)), "nothing is left out for good"


def test_without_anything_in_the_band_the_order_goes_on() -> None:
    order = [item_at(n, num_items=NUM_ITEMS, seed=1) for n in range(10, 410)]
    assert chosen(history(i0=0.0, i4=1.0), explore=0.0) == order
    assert chosen(History(0, 1), explore=0.0) == order


def test_the_newest_groups_say_how_hard_an_item_is() -> None:
    found = History(100, 1)
    for number, mean in enumerate((0.5, 1.0, 1.0)):
        found.saw(0, Finished(number, 3, (mean,), 4.0))
    assert set(chosen(found, explore=0.0, newest=3, high=0.9)) == {3}
    assert len(set(chosen(found, explore=0.0, newest=2, high=0.9))) == NUM_ITEMS


@pytest.mark.parametrize("settings", [{"low": 0.9}, {"explore": 1.5}, {"explore": -0.1}, {"newest": 0}])
def test_settings_without_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="needed: low <= high"):
        chosen(History(0, 1), count=1, **settings)
