"""The order of items is a function of the position alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producers.task_order import item_at


@given(num_items=st.integers(1, 40), seed=st.integers(0, 2**62), number=st.integers(0, 50), shuffle=st.booleans())
def test_each_pass_holds_every_item_once(num_items: int, seed: int, number: int, shuffle: bool) -> None:
    start = number * num_items
    items = [item_at(n, num_items=num_items, seed=seed, shuffle=shuffle) for n in range(start, start + num_items)]
    assert sorted(items) == list(range(num_items))
    assert shuffle or items == list(range(num_items))


@given(cut=st.integers(0, 30), seed=st.integers(0, 100))
def test_a_restart_neither_skips_nor_repeats(cut: int, seed: int) -> None:
    whole = [item_at(n, num_items=7, seed=seed) for n in range(30)]
    before = [item_at(n, num_items=7, seed=seed) for n in range(cut)]
    for other in range(10):  # what else the process was asked meanwhile does not matter
        item_at(other, num_items=11, seed=seed + other)
    assert before + [item_at(n, num_items=7, seed=seed) for n in range(cut, 30)] == whole


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    passes = {tuple(item_at(n + 20 * k, num_items=20, seed=s) for n in range(20)) for k in range(5) for s in range(5)}
    assert len(passes) == 25


def test_endless_sets_are_taken_as_they_come() -> None:
    assert [item_at(n, num_items=None, seed=3) for n in (0, 5, 10**12)] == [0, 5, 10**12]
