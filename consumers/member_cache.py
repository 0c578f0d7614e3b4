"""Members of open groups as they were decoded on arrival, so that most are not decoded again when their group closes."""

from __future__ import annotations

from schemas.codec import decode
from schemas.records import Trajectory

LARGEST_BYTES = 32 * 1024 * 1024
_OBJECTS_BYTES = 4096
"""What a decoded record costs beside its packed columns, roughly."""


class MemberCache:
    """At most `largest_bytes` of decoded members, by (partition, offset); what does not fit is not kept.

    Nothing is thrown out for a newcomer: groups close about in the order in which they open, so the oldest members are
    the next to be asked for, and a cache that dropped them would be of no use once it is full. What is kept leaves when
    its group closes, when the position passes it, or with its partition.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self.left_bytes = largest_bytes
        self._kept: dict[tuple[int, int], tuple[Trajectory, int]] = {}

    def __len__(self) -> int:
        """Members that are kept."""
        return len(self._kept)

    def keep(self, partition: int, offset: int, record: Trajectory, size_bytes: int) -> None:
        """Remember the record at an offset, of this many bytes on the log, if there is room."""
        cost = size_bytes + _OBJECTS_BYTES
        if cost <= self.left_bytes and (partition, offset) not in self._kept:
            self._kept[partition, offset] = record, cost
            self.left_bytes -= cost

    def take(self, partition: int, offset: int, data: bytes) -> Trajectory:
        """The member at an offset, which is no longer kept; decoded again from its bytes if it was not."""
        found = self._kept.pop((partition, offset), None)
        if found is not None:
            self.left_bytes += found[1]
            return found[0]
        record = decode(data)
        assert isinstance(record, Trajectory)  # it was read before
        return record

    def forget(self, partition: int | None = None, below: int | None = None) -> None:
        """Forget a partition's records (None: of all), those below an offset or every one."""
        for key in [k for k in self._kept if partition in (None, k[0]) and (below is None or k[1] < below)]:
            self.left_bytes += self._kept.pop(key)[1]
