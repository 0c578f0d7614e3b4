"""Where to read a topic again after a crash: the first record about a group that has not ended. Pure.

A dispatcher stores, for each partition, a position and a note. All that it must know of the log below that position is in
the note: that every group below `floor` has ended, who owned the inbox, which outcome was the last, how many were kept
and dropped. Each note is true of the log by itself, so it does not matter that notes of different partitions are of
different moments, or that a superseded dispatcher stored an older one: reading begins earlier then, and ends the same.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import NamedTuple

Note = Mapping[str, int | str]


class Mark(NamedTuple):
    """A record that may be needed again."""

    offset: int
    number: int
    """Of its group."""
    note: Note = MappingProxyType({})
    """What must be known of the log before it."""
    key: tuple[int, int] | None = None
    """Of an outcome that waits for its plan: needed until it is planned."""


class Trail:
    """The marks of one partition, in offset order.

    >>> trail = Trail()
    >>> for offset, number in ((10, 4), (11, 5), (15, 4)):
    ...     trail.saw(Mark(offset, number))
    >>> trail.first(4).offset, trail.first(5).offset, trail.first(6)
    (10, 11, None)
    """

    def __init__(self, memory: int = 0) -> None:
        self._memory = memory
        self._marks: deque[Mark] = deque()

    def saw(self, mark: Mark) -> None:
        """A further record."""
        self._marks.append(mark)

    def first(self, floor: int, waiting: Container[tuple[int, int]] = ()) -> Mark | None:
        """The first record to read again; None: nothing up to here is needed."""
        marks = self._marks
        while len(marks) > self._memory and marks[0].number < floor and marks[0].key not in waiting:
            marks.popleft()
        return marks[0] if marks else None


def to_text(floor: int, note: Note) -> str:
    """As the note of a stored position.

    >>> to_text(7, {"last": 41})
    '{"floor":7,"last":41}'
    """
    return json.dumps({"floor": floor, **note}, separators=(",", ":"))


def from_text(text: str, wanted: Mapping[str, type]) -> dict[str, int | str] | None:
    """From a note; None where it is not one of ours, with every field wanted.

    >>> from_text('{"floor":7,"last":41}', {"last": int}), from_text("", {}), from_text('{"floor":7}', {"last": int})
    ({'floor': 7, 'last': 41}, None, None)
    """
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    fields = {"floor": int, **wanted}
    if any(type(data.get(name)) is not kind for name, kind in fields.items()):
        return None
    return {name: data[name] for name in fields}
