"""What an object store is. `infra.s3_store` and `infra.memory_store` implement it; both pass `tests/contract/test_store.py`.

Integrity never rests on the store: whoever reads checks sizes and digests of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from schemas.errors import SettingError


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


MAX_KEY_BYTES = 900
"""Of a key in UTF-8; S3 allows 1,024 with the bucket's prefix in front."""


def check_key(key: str) -> str:
    """Return `key` if every store takes it the same way, else raise SettingError.

    >>> check_key("demo/main/blobs/ab12")
    'demo/main/blobs/ab12'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or _unprintable(key) or len(key.encode()) > MAX_KEY_BYTES:
        raise SettingError(
            f"key {key[:80]!r} is not allowed: use a relative path of printable characters without empty parts, '.' "
            f"or '..', at most {MAX_KEY_BYTES} bytes (some stores would write elsewhere, others refuse)"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it can begin keys: empty, or a key whose last part may be cut or empty.

    >>> check_prefix("demo/main/manifests/")
    'demo/main/manifests/'
    """
    if prefix:
        check_key(prefix[:-1] if prefix.endswith("/") else prefix)
    return prefix


def _unprintable(text: str) -> bool:
    return "\\" in text or not text.isprintable()
