"""An object store in this process's memory, with knobs that break it; it passes the same contract suite as the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from infra.store import ObjectInfo, check_key, check_prefix
from schemas.errors import ObjectMissing, StoreError


class MemoryStore:
    """Objects in a dictionary. `truncate`, `flip` and `fail_next` make it as bad as a real store can be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._failures = 0
        self._skip = 0
        self.puts: list[str] = []
        """Keys in the order in which they were stored."""
        self.gets: list[str] = []
        """Keys in the order in which they were read."""
        self.num_lists = 0
        self.on_get: Callable[[str, bytes], bytes] | None = None
        """Changes what a reader gets, as a faulty network would."""

    def __repr__(self) -> str:
        return "MemoryStore()"

    def check(self) -> None:
        """Raise StoreError when the store does not answer."""
        self._maybe_fail("check")

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store an object whole. With `if_absent`, False when one was there already."""
        check_key(key)
        self._maybe_fail(f"put {key}")
        with self._lock:
            if if_absent and key in self._objects:
                return False
            self._objects[key] = bytes(data)
            self.puts.append(key)
        return True

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The whole object. Raises ObjectMissing, or StoreError when it is larger than `max_bytes`."""
        check_key(key)
        self._maybe_fail(f"get {key}")
        with self._lock:
            self.gets.append(key)
            data = self._objects.get(key)
        if data is None:
            raise ObjectMissing(f"memory store: there is no object {key}")
        if max_bytes is not None and len(data) > max_bytes:
            raise StoreError(f"memory store: {key} has {len(data)} bytes, at most {max_bytes} are accepted")
        return data if self.on_get is None else self.on_get(key, data)

    def size(self, key: str) -> int | None:
        """Size in bytes; None when there is no such object."""
        check_key(key)
        self._maybe_fail(f"size {key}")
        with self._lock:
            data = self._objects.get(key)
        return None if data is None else len(data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order."""
        check_prefix(prefix)
        self._maybe_fail(f"list {prefix}")
        with self._lock:
            self.num_lists += 1
            found = [ObjectInfo(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there do not matter."""
        for key in keys:
            check_key(key)
            self._maybe_fail(f"delete {key}")
            with self._lock:
                self._objects.pop(key, None)

    def truncate(self, key: str, size_bytes: int) -> None:
        """Cut a stored object short."""
        with self._lock:
            self._objects[key] = self._objects[key][:size_bytes]

    def flip(self, key: str, bit: int) -> None:
        """Turn one bit of a stored object over (counted from its start, modulo its length)."""
        with self._lock:
            data = bytearray(self._objects[key])
            data[(bit // 8) % len(data)] ^= 1 << (bit % 8)
            self._objects[key] = bytes(data)

    def fail_next(self, count: int, *, after: int = 0) -> None:
        """Let `after` calls pass, then fail `count` calls with StoreError."""
        with self._lock:
            self._skip, self._failures = after, count

    def _maybe_fail(self, what: str) -> None:
        with self._lock:
            if self._failures == 0:
                return
            if self._skip > 0:
                self._skip -= 1
                return
            self._failures -= 1
        raise StoreError(f"memory store: told to fail ({what})")
