"""The reader of the log in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infra._log_checks import check_offset, truncated
from infra.log import Envelope, Place
from schemas.errors import BrokerError, LogGap, SettingError

if TYPE_CHECKING:
    from infra.memory_log import MemoryLog


class MemoryReader:
    """Reads fixed partitions; one thread uses it."""

    def __init__(self, log: MemoryLog, positions: Mapping[Place, int]) -> None:
        if not positions:
            raise SettingError("a reader was asked for without any partition: give at least one position")
        self._log, self._closed = log, False
        self._positions = {Place(*place): offset for place, offset in positions.items()}
        for place, offset in self._positions.items():
            check_offset(place, offset)
            with log.changed:
                log.partition(place)

    def poll(self, timeout_s: float, max_records: int = 1000) -> list[Envelope]:
        """Next records of all partitions; empty after the timeout. Raises LogGap, LogTruncated, BrokerError."""
        deadline_s = time.monotonic() + timeout_s
        with self._log.changed:
            while True:
                if self._closed:
                    raise BrokerError("this reader is closed: ask the log for another")
                records = self._take(max_records)
                left_s = deadline_s - time.monotonic()
                if records or left_s <= 0:
                    return records
                self._log.changed.wait(left_s)

    def seek(self, place: Place, offset: int) -> None:
        """Read on from `offset`."""
        check_offset(place, offset)
        self.position(place)
        self._positions[Place(*place)] = offset

    def position(self, place: Place) -> int:
        """Offset of the next record that poll will return."""
        if place not in self._positions:
            raise SettingError(f"{place[0]}[{place[1]}] is not read here; this reader has {sorted(self._positions)}")
        return self._positions[place]

    def end(self, place: Place) -> int:
        """Offset behind the last record; never before `position`."""
        with self._log.changed:
            return max(self.position(place), self._log.partition(place).end)

    def close(self) -> None:
        """Let go; never raises."""
        with self._log.changed:
            self._closed = True
            self._log.changed.notify_all()

    def _take(self, max_records: int) -> list[Envelope]:
        """Records at the positions; the partition that gave some goes to the back of the row."""
        for place, position in list(self._positions.items()):
            part = self._log.partition(place)
            if position < part.start:
                self._positions[place] = part.start
                raise LogGap(*place, position, part.start)
            if position > part.end:
                raise truncated(place, position, part.end)
            first = part.index(position)
            records = part.records[first : first + max_records]
            if records:
                del self._positions[place]
                self._positions[place] = records[-1].offset + 1
                return records
            self._positions[place] = part.end  # only removed records are left
        return []
