"""Training and held-out items: apart, together everything, and the same however many items follow."""

from __future__ import annotations

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.curriculum import Finished, History
from producers.splits import FIRST_HELD_OUT, Split, is_held_out


@given(num_items=st.integers(0, 300), seed=st.integers(0, 99), share=st.floats(0, 0.99))
def test_every_item_is_in_one_part(num_items: int, seed: int, share: float) -> None:
    split = Split(num_items, seed, share)
    assert split.num_training is not None and split.num_held_out is not None
    training = [split.training(place) for place in range(split.num_training)]
    held = [split.held_out(place) for place in range(split.num_held_out)]
    assert sorted(training + held) == list(range(num_items))
    assert training == sorted(training) and held == sorted(held)
    assert [split.place(item) for item in training] == list(range(len(training)))
    assert [split.place(item) for item in (*held, num_items)] == [None] * (len(held) + 1)
    assert share > 0 or not held


@given(num_items=st.integers(2, 60), share=st.floats(0, 0.99))
def test_a_curriculum_sees_results_by_place_and_none_of_what_is_held_out(num_items: int, share: float) -> None:
    split, history = Split(num_items, 1, share), History(200, 1)
    for item in range(num_items):
        history.saw(0, Finished(item, item, (1.0,), 3.0))
    seen = split.seen(history)
    assert list(seen.items()) == list(range(split.num_training or 0))
    for place in seen.items():
        assert [entry.item for entry in seen.of(place)] == [split.training(place)]
    assert len(seen) == len(history)


def test_about_the_share_is_held_out() -> None:
    held = Split(10_000, 3, 0.2).num_held_out
    assert held is not None and abs(held - 2000) < 160, "4 standard deviations"


def test_rows_added_to_a_file_move_nothing_and_a_greater_share_holds_out_more() -> None:
    short, long = Split(100, 0, 0.3), Split(150, 0, 0.3)
    assert short.num_held_out is not None
    assert [short.held_out(n) for n in range(short.num_held_out)] == [
        long.held_out(n) for n in range(short.num_held_out)
    ]
    assert all(is_held_out(item, 0, 0.5) for item in range(100) if is_held_out(item, 0, 0.3))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_endless_task_trains_on_its_own_numbers_and_never_reaches_the_others(share: float) -> None:
    split = Split(None, 0, share)
    assert split.num_training is split.num_held_out is None
    assert [split.training(n) for n in (0, 9)] == [0, 9] == [split.place(n) for n in (0, 9)]
    assert split.held_out(5) == FIRST_HELD_OUT + 5 < 2**62


def test_doctests() -> None:
    result = doctest.testmod(importlib.import_module("producers.splits"))
    assert result.attempted and not result.failed
