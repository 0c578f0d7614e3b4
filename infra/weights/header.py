"""The header of a safetensors file, read and checked without mapping the file: names, dtypes, shapes, extents.

Layout of the file: 8 bytes with the header's length (little-endian), the header as JSON, then the tensors' bytes
without holes. Anything else is refused before an engine sees it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

from schemas.errors import WeightsError

MAX_HEADER_BYTES = 10 * 1024 * 1024
MAX_TENSORS = 200_000
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class Tensor(NamedTuple):
    """One tensor in a file: `start` and `end` count bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(data: bytes | memoryview, *, size_bytes: int | None = None, what: str = "file") -> list[Tensor]:
    """Tensors of a safetensors file in order of name. `data` must hold at least the header.

    `size_bytes` is the size of the whole file when `data` is only its beginning. Raises WeightsError.
    """
    size_bytes = len(data) if size_bytes is None else size_bytes
    length = header_length(data, size_bytes=size_bytes, what=what)
    table = strict_json(bytes(data[8 : 8 + length]), what=f"{what}: header")
    if not isinstance(table, dict):
        raise WeightsError(f"{what}: the header is not an object")
    table.pop("__metadata__", None)
    if len(table) > MAX_TENSORS:
        raise WeightsError(f"{what}: {len(table)} tensors, at most {MAX_TENSORS} are accepted")
    tensors = [_tensor(name, entry, 8 + length, what) for name, entry in table.items()]
    _check_extents(tensors, 8 + length, size_bytes, what)
    return sorted(tensors)


def header_length(data: bytes | memoryview, *, size_bytes: int, what: str = "file") -> int:
    """Length of the JSON after the first 8 bytes. Raises WeightsError when it cannot be right."""
    if len(data) < 8:
        raise WeightsError(f"{what}: {size_bytes} bytes are too few for a safetensors file")
    length = int(struct.unpack("<Q", data[:8])[0])
    if length > MAX_HEADER_BYTES or 8 + length > size_bytes:
        raise WeightsError(
            f"{what}: header of {length} bytes in a file of {size_bytes}; at most {MAX_HEADER_BYTES} are accepted"
        )
    return length


def strict_json(data: bytes, *, what: str) -> Any:
    """JSON without repeated keys, NaN or absurd nesting. Raises WeightsError."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{what}: not the JSON that was expected ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _tensor(name: str, entry: Any, base: int, what: str) -> Tensor:
    """One entry of the header, with every field checked."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(f"{what}: tensor {name[:80]!r} has fields other than dtype, shape and data_offsets")
    dtype, shape, extent = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise WeightsError(
            f"{what}: tensor {name[:80]!r} has dtype {str(dtype)[:20]!r}; known: {', '.join(DTYPE_BYTES)}"
        )
    if not is_sizes(shape) or not is_sizes(extent) or len(extent) != 2:
        raise WeightsError(f"{what}: tensor {name[:80]!r} has a shape or an extent that is not made of sizes")
    if extent[1] - extent[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise WeightsError(f"{what}: tensor {name[:80]!r} of {dtype} {shape} does not fill bytes {extent}")
    return Tensor(name, dtype, tuple(shape), base + extent[0], base + extent[1])


def is_sizes(value: Any) -> bool:
    """Whether this is a short list of whole numbers of at least 0."""
    return isinstance(value, list) and len(value) <= 16 and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _check_extents(tensors: list[Tensor], start: int, size_bytes: int, what: str) -> None:
    """The tensors must follow each other without holes, up to the file's last byte."""
    at = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != at:
            raise WeightsError(f"{what}: tensor {tensor.name[:80]!r} begins at {tensor.start}, not at {at}")
        at = tensor.end
    if at != size_bytes:
        raise WeightsError(f"{what}: the tensors end at byte {at}, the file at {size_bytes}")
