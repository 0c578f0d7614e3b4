"""The outcome chain: a reader takes an outcome only if `previous` is the closing offset that it last took in that partition.

Processors are deterministic in the partition, so every outcome ever written is the k-th outcome of that partition, by
whomever. The chain makes the first one that continues it count and skips every repeat; a reader's whole memory is one
number per partition.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

NONE = -1
"""Closing offset before the first outcome."""


@dataclass(slots=True)
class Chain:
    """A fold over the outcomes of one partition, in offset order.

    >>> chain = Chain()
    >>> [chain.take(previous, closing) for previous, closing in [(-1, 4), (-1, 4), (4, 9), (5, 9), (9, 12)]]
    [True, False, True, False, True]
    """

    last: int = NONE

    def take(self, previous: int, closing_offset: int) -> bool:
        """Whether this outcome counts."""
        if previous != self.last or closing_offset <= self.last:
            return False
        self.last = closing_offset
        return True


class ReadBack(NamedTuple):
    """Where a processor must read its outcome partition from, to know what has been written: kept beside its position."""

    offset: int
    """Offset on `samples`."""
    last: int
    """Closing offset of the outcome before that place in the chain."""

    def to_note(self) -> str:
        """As the note of a committed position.

        >>> ReadBack(7, 41).to_note()
        '{"samples":7,"last":41}'
        """
        return json.dumps({"samples": self.offset, "last": self.last}, separators=(",", ":"))

    @classmethod
    def from_note(cls, note: str) -> ReadBack | None:
        """From a note; None if it is not one of ours (then the whole partition is read).

        >>> ReadBack.from_note('{"samples":7,"last":41}')
        ReadBack(offset=7, last=41)
        >>> ReadBack.from_note("") is None
        True
        """
        try:
            data = json.loads(note)
            offset, last = data["samples"], data["last"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(offset, int) or not isinstance(last, int) or offset < 0 or last < NONE:
            return None
        return cls(offset, last)
