"""What an object store is. `infra.s3_store` and `infra.memory_store` implement it; both pass `tests/contract/test_store.py`.

Integrity never rests on the store: whoever reads checks sizes and digests of its own.
"""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """A stored object."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Immutable objects under keys. Keys are relative paths without `..`; every call has a time limit."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store an object whole. With `if_absent`, False when one was there already (a belt, never a fence)."""
        ...

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The whole object. Raises ObjectMissing, or StoreError when it is larger than `max_bytes`."""
        ...

    def size(self, key: str) -> int | None:
        """Size in bytes; None when there is no such object."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there do not matter."""
        ...
