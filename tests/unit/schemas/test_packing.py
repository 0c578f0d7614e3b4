"""Packed arrays: their bytes, their views, and what numpy refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.packing import pack_bits, pack_floats, pack_ints, unpack_bits, unpack_floats, unpack_ints


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ints_come_back(values: list[int]) -> None:
    assert unpack_ints(pack_ints(values)).tolist() == values
    assert pack_ints(np.array(values, dtype=np.int64)) == pack_ints(values)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_come_back(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)).tolist() == values


@given(st.lists(st.booleans()))
def test_bits_come_back(values: list[bool]) -> None:
    data = pack_bits(values)
    assert len(data) == (len(values) + 7) // 8
    assert unpack_bits(data, len(values)).tolist() == values


def test_bytes_are_little_endian_and_bits_start_at_the_least() -> None:
    assert pack_ints([1, -1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert pack_floats([1.0]) == b"\x00\x00\x80\x3f"
    assert pack_bits([True] + [False] * 7 + [True]) == b"\x01\x01"


def test_padding_bits_are_zero() -> None:
    assert pack_bits([True] * 3) == b"\x07"


def test_slices_and_other_byte_orders_are_packed_alike() -> None:
    values = np.arange(10, dtype=">i4")[::2]
    assert pack_ints(values) == pack_ints([0, 2, 4, 6, 8])


def test_views_cannot_be_written_to() -> None:
    for view in (unpack_ints(pack_ints([1])), unpack_floats(pack_floats([1.0]))):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 2


def test_a_number_of_more_than_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ints([2**31])


def test_bytes_of_no_whole_item_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        unpack_ints(b"\x00" * 5)
