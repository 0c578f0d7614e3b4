"""Packed per-token arrays: little-endian int32 ids, float32 log-probs, bit-packed masks, checked on the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bits = NDArray[np.bool_]


def pack_ints(values: Sequence[int] | NDArray[Any]) -> bytes:
    """[T] token ids to bytes.

    >>> pack_ints([1, 258]).hex()
    '0100000002010000'
    """
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack_ints(data: bytes) -> Ints:
    """Bytes to a read-only [T] view of int32."""
    return np.frombuffer(data, dtype="<i4")


def pack_floats(values: Sequence[float] | NDArray[Any]) -> bytes:
    """[S] log-probs to bytes, as float32."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> Floats:
    """Bytes to a read-only [S] view of float32."""
    return np.frombuffer(data, dtype="<f4")


def pack_bits(values: Sequence[bool] | NDArray[Any]) -> bytes:
    """[T] booleans to ceil(T/8) bytes, least bit first.

    >>> pack_bits([True, False, True]).hex()
    '05'
    """
    return np.packbits(np.asarray(values, dtype=np.bool_), bitorder="little").tobytes()


def unpack_bits(data: bytes, count: int) -> Bits:
    """Bytes to [count] booleans."""
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count, bitorder="little").astype(np.bool_)
