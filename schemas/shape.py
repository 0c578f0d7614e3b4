"""The fields of one record type: what Python calls them, what Avro calls them, and the strict way from one to the other.

A `Shape` is worked out once, from the dataclass's annotations and its schema, and refuses at import to exist where the two
differ. Its hot path is a few calls for the whole record; fields are looked at one by one only when something is unusual,
to name the culprit. Types are exact: bool is no int, int may stand for float, a plain string is no Status, and numpy's
scalars are refused. Reading sets a new object's slots directly, four times faster than a frozen dataclass's constructor.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import typing
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from operator import attrgetter, call, itemgetter
from typing import Any, Generic, TypeVar

from schemas import wire
from schemas.errors import RecordError
from schemas.records import DeadReason, Segment, VersionRun
from schemas.wire import Add, Kind

R = TypeVar("R")
_MAY_BE_NAN = frozenset({"metrics"})
"""Maps of measurements, where NaN and infinity are news; everywhere else they are refused."""
_WIDER: tuple[tuple[type, Any], ...] = ((str, str), (dict, Mapping))
"""Where a subclass will do: members of string enums as text, and any mapping."""
_PLAIN: Mapping[Any, Kind] = {
    str: wire.STRING,
    int: wire.LONG,
    float: wire.DOUBLE,
    bool: wire.BOOLEAN,
    bytes: wire.BYTES,
    float | None: wire.optional(wire.DOUBLE),
    bytes | None: wire.optional(wire.BYTES),
    Mapping[str, float]: wire.number_map(finite=True),
    Mapping[str, str]: wire.TEXT_MAP,
    tuple[float, ...]: wire.DOUBLES,
    tuple[int, ...]: wire.LONGS,
    tuple[VersionRun, ...]: wire.VERSIONS,
    tuple[Segment, ...]: wire.SEGMENTS,
    tuple[tuple[str, bytes], ...]: wire.HEADERS,
}


class Shape(Generic[R]):
    """One dataclass or named tuple beside one Avro record schema (as JSON gives it)."""

    def __init__(self, cls: type[R], schema: Mapping[str, Any]) -> None:
        hints = typing.get_type_hints(cls)
        fields = schema["fields"]
        self.cls = cls
        self.names = tuple(field["name"] for field in fields)
        assert set(self.names) == set(hints), f"{cls.__name__}: {set(self.names) ^ set(hints)} on one side only"
        self._kinds = tuple(_kind(hints[field["name"]], field) for field in fields)
        for field, kind in zip(fields, self._kinds, strict=True):
            assert bare(field["type"]) == kind.avro, f"{cls.__name__}.{field['name']}: {field['type']} for {kind.avro}"
        self.avro = {"type": "record", "name": cls.__name__, "fields": [bare(field) for field in fields]}
        self._values: Callable[[R], tuple[Any, ...]] = attrgetter(*self.names)
        self._items: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*self.names)
        self._writes = _blocks(self._kinds)
        self._reads = tuple((index, kind.read) for index, kind in enumerate(self._kinds) if kind.read)
        self._make = maker(cls, self.names)
        self._seen: set[tuple[type, ...]] = set()

    def write(self, record: R, add: Add) -> None:
        """Give the record's bytes to `add`, as iterables of pieces. Raises RecordError naming the first field that does not fit."""
        values = self._values(record)
        if tuple(map(type, values)) not in self._seen:
            self._check_types(values)
        try:
            for write, where in self._writes:
                write(values[where], add)
        except (ValueError, TypeError, OverflowError, struct.error, RecordError) as error:
            raise self._explain(values, error) from None

    def read(self, datum: dict[str, Any]) -> R:
        """The record of a dict as Avro reads it."""
        values = list(self._items(datum))
        for index, convert in self._reads:
            values[index] = convert(values[index])
        return self._make(values)

    def _check_types(self, values: tuple[Any, ...]) -> None:
        exact = True
        for name, kind, value in zip(self.names, self._kinds, values, strict=True):
            if type(value) not in kind.allowed:
                exact = False
                if not any(base in kind.allowed and isinstance(value, wider) for base, wider in _WIDER):
                    allowed = " or ".join(sorted(one.__name__ for one in kind.allowed))
                    raise self._unfit(name, value, f"{allowed} is allowed")
        if exact:  # so that this set stays as small as the number of allowed combinations
            self._seen.add(tuple(map(type, values)))

    def _explain(self, values: tuple[Any, ...], error: Exception) -> RecordError:
        for name, kind, value in zip(self.names, self._kinds, values, strict=True):
            try:
                kind.write((value,) if kind.many else value, [].extend)
            except RecordError as inner:
                return self._unfit(name, value, inner.detail)
            except (ValueError, TypeError, OverflowError, struct.error) as inner:
                return self._unfit(name, value, str(inner))
        raise AssertionError(f"{self.cls.__name__}: no field fails alone") from error

    def _unfit(self, name: str, value: Any, why: str) -> RecordError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return RecordError(DeadReason.INVALID, f"{self.cls.__name__}.{name}: got {type(value).__name__} {shown}: {why}")


def bare(schema: Any) -> Any:
    """A schema without what does not change its bytes or their meaning: doc and namespace."""
    if isinstance(schema, list):
        return [bare(one) for one in schema]
    if isinstance(schema, dict):
        return {key: bare(value) for key, value in schema.items() if key not in ("doc", "namespace")}
    return schema


def _blocks(kinds: tuple[Kind, ...]) -> tuple[tuple[wire.Write, Any], ...]:
    """Neighbours of one kind in one call: (write, index or slice of the values)."""
    writes: list[tuple[wire.Write, Any]] = []
    at = 0
    while at < len(kinds):
        kind, end = kinds[at], at + 1
        while kind.many and end < len(kinds) and kinds[end] is kind:
            end += 1
        writes.append((kind.write, slice(at, end) if kind.many else at))
        at = end
    return tuple(writes)


def maker(cls: type[R], names: tuple[str, ...]) -> Callable[[Iterable[Any]], R]:
    """Makes an object of the values of all its fields, in the order of these names; no default is filled in.

    >>> maker(VersionRun, ("epoch", "version", "count"))([1, 7, 512])
    VersionRun(epoch=1, version=7, count=512)
    """
    if issubclass(cls, tuple):
        assert cls._fields == names, f"{cls.__name__}: the schema has another order"  # type: ignore[attr-defined]
        return cls._make  # type: ignore[attr-defined, no-any-return]
    assert set(names) == set(cls.__slots__), f"{cls.__name__}: {set(names) ^ set(cls.__slots__)}"  # type: ignore[attr-defined]  # a dataclass with slots
    slots = tuple(getattr(cls, name).__set__ for name in names)

    def make(values: Iterable[Any]) -> R:
        record = object.__new__(cls)
        for _ in map(call, slots, repeat(record), values):
            pass
        return record

    return make


def _kind(hint: Any, field: Mapping[str, Any]) -> Kind:
    """How a field of this annotation is handled; a new sort of annotation needs a line in `_PLAIN` or here."""
    if field["name"] in _MAY_BE_NAN:
        return wire.number_map(finite=False)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return wire.enumeration(hint)
    if dataclasses.is_dataclass(hint):
        shape: Shape[Any] = Shape(typing.cast(Any, hint), field["type"])
        return Kind(shape.avro, frozenset({shape.cls}), shape.write, shape.read)
    item = typing.get_args(hint)[0]
    shape = Shape(item, field["type"]["items"])
    return wire.array(shape.avro, item, shape.write, shape.read)
