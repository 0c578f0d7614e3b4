"""What can be read of a record that cannot be read: its fields up to the first fault, with bounds on everything.

Knows the schemas of this version and walks their bytes itself, since a decoder gives all or nothing. For people only:
nothing that is decided rests on it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from infra.safe_text import safe, safe_bytes
from schemas.codec import HEADER_BYTES, SCHEMAS, fingerprint, kind

MAX_ITEMS = 1000
"""Items of arrays and maps that are walked before it stops."""
_SHOWN_ITEMS = 5
_FIXED = {"boolean": struct.Struct("<?"), "float": struct.Struct("<f"), "double": struct.Struct("<d")}


class Glimpse(NamedTuple):
    """The type that the header names ("" for none), its readable fields as printable text, and what stopped the reading."""

    kind: str
    fields: tuple[tuple[str, str], ...]
    stopped: str
    """"" where the record is whole."""


class _Stopped(Exception):
    """Nothing behind this byte can be trusted to mean anything."""


def glimpse(data: bytes | None) -> Glimpse:
    """Read as far as it goes; never raises, whatever the bytes are."""
    found = kind(data)
    if data is None or found is None:
        return Glimpse("", (), "its header names no record of this version")
    if data[2:HEADER_BYTES] != fingerprint(found):
        return Glimpse(found.__name__, (), "it is written with another version's schema")
    walk, fields = _Walk(data), []
    try:
        for field in json.loads(SCHEMAS[found])["fields"]:
            fields.append((str(field["name"]), safe(walk.value(field["type"]))))
        left = len(data) - walk.at
        stopped = f"{left} bytes are left over behind the last field" if left else ""
    except _Stopped as error:
        stopped = str(error)
    return Glimpse(found.__name__, tuple(fields), stopped)


class _Walk:
    """A position in a body; each call takes one value and shows it."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at, self._items = data, HEADER_BYTES, 0

    def value(self, schema: Any) -> str:
        """The next value, as text."""
        if isinstance(schema, list):
            return self.value(schema[self._choice(len(schema))])
        if isinstance(schema, str):
            return self._primitive(schema)
        kind_of = schema["type"]
        if not isinstance(kind_of, str):
            return self.value(kind_of)
        if kind_of == "record":
            return "{" + ", ".join(f"{f['name']}={self.value(f['type'])}" for f in schema["fields"]) + "}"
        if kind_of == "enum":
            return str(schema["symbols"][self._choice(len(schema["symbols"]))])
        if kind_of in ("array", "map"):
            return self._blocks(schema["items" if kind_of == "array" else "values"], kind_of == "map")
        if kind_of == "fixed":
            return f"<{len(self._take(int(schema['size'])))} bytes>"
        return self._primitive(kind_of)

    def _primitive(self, name: str) -> str:
        if name == "null":
            return "null"
        if name in ("int", "long"):
            return str(self._long())
        if name == "bytes":
            return f"<{len(self._take(self._long()))} bytes>"
        if name == "string":
            return f'"{safe_bytes(self._take(self._long()))}"'
        fixed = _FIXED[name]
        return str(fixed.unpack(self._take(fixed.size))[0])

    def _blocks(self, item: Any, keyed: bool) -> str:
        shown, total = [], 0
        while count := self._long():
            if count < 0:
                count = -count
                self._long()
            for _ in range(count):
                total, self._items = total + 1, self._items + 1
                if self._items > MAX_ITEMS:
                    raise _Stopped(f"more than {MAX_ITEMS} items before byte {self.at}; not shown")
                name = f"{self._primitive('string')}: " if keyed else ""
                text = name + self.value(item)
                if total <= _SHOWN_ITEMS:
                    shown.append(text)
        more = [f"... {total} in all"] if total > _SHOWN_ITEMS else []
        return "[" + ", ".join([*shown, *more]) + "]"

    def _choice(self, count: int) -> int:
        at, value = self.at, self._long()
        if not 0 <= value < count:
            raise _Stopped(f"choice {value} of {count} at byte {at}")
        return value

    def _long(self) -> int:
        value = shift = 0
        start = self.at
        while shift < 64:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            shift += 7
        raise _Stopped(f"a number of more than 64 bits at byte {start}")

    def _take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self._data):
            raise _Stopped(f"{size} bytes are wanted at byte {self.at} of {len(self._data)}")
        found = self._data[self.at : self.at + size]
        self.at += size
        return found
