"""What curricula remember: the same log gives the same memory, whatever order its partitions are read in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.curricula import CURRICULA, make_curriculum
from producers.curriculum import Draw, Finished, History
from schemas.errors import SettingError


def entries(rng: random.Random, count: int) -> list[tuple[int, Finished]]:
    """(partition, result) in a log's order."""
    found = []
    for number in range(count):
        rewards = tuple(rng.choice((0.0, 0.5, 1.0)) for _ in range(rng.randint(0, 3)))
        found.append((number % 3, Finished(number, rng.randrange(8), rewards, rng.random() * 9)))
    return found


@given(st.integers(0, 10**6), st.integers(0, 60), st.integers(0, 40))
def test_the_order_of_reading_does_not_matter(seed: int, count: int, memory: int) -> None:
    rng = random.Random(seed)
    told = entries(rng, count)
    one, other = History(memory, 3), History(memory, 3)
    for partition, entry in told:
        one.saw(partition, entry)
    for partition in rng.sample(range(3), 3):
        for entry in (entry for at, entry in told if at == partition):
            other.saw(partition, entry)
    assert one == other
    assert len(one) == sum(min(one.per_partition, len([1 for at, _ in told if at == p])) for p in range(3))
    assert list(one.items()) == sorted({entry.item for item in one.items() for entry in one.of(item)})


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 40), st.data())
def test_reading_from_as_far_back_as_the_memory_reaches_is_enough(
    seed: int, count: int, memory: int, data: st.DataObject
) -> None:
    told = entries(random.Random(seed), count)
    whole, late = History(memory, 3), History(memory, 3)
    for partition, entry in told:
        whole.saw(partition, entry)
    for partition in range(3):
        mine = [entry for at, entry in told if at == partition]
        first = data.draw(st.integers(0, max(0, len(mine) - late.per_partition)))
        for entry in mine[first:]:
            late.saw(partition, entry)
    assert late == whole


@pytest.mark.parametrize("name", CURRICULA)
@given(st.integers(0, 10**6), st.integers(0, 200), st.none() | st.integers(1, 9))
def test_every_curriculum_chooses_a_known_item_by_draw_and_history_alone(
    name: str, seed: int, number: int, num_items: int | None
) -> None:
    curriculum = make_curriculum(name, {})
    history = History(30, 3)
    for partition, entry in entries(random.Random(seed), 25):
        if num_items is None or entry.item < num_items:
            history.saw(partition, entry)
    draw = Draw(number=number, num_items=num_items, seed=seed)
    random.seed(number)
    item = curriculum(draw, history)
    assert item >= 0 and (num_items is None or item < num_items)
    assert curriculum(draw, history) == item


def own(draw: Draw, history: History, *, step: int = 1) -> int:
    """A curriculum of one's own."""
    return draw.number * step


def test_one_of_your_own_is_given_by_module_and_name() -> None:
    curriculum = make_curriculum(f"{__name__}:own", {"step": 3})
    assert curriculum(Draw(number=4, num_items=None, seed=0), History(0, 1)) == 12


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="known: difficulty-band, in-order, shuffled, skip-solved"):
        make_curriculum("harder", {})
    with pytest.raises(SettingError, match="has no setting 'time'"):
        make_curriculum("skip-solved", {"time": 3})
