"""Two questions to a broker that need no client: does it serve, and which release is it.

For waiting on a server that is starting, and for a doctor: a client library would retry, cache and log on its own.
Plain connections only; both requests are allowed before a SASL log-in.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_METADATA, _API_VERSIONS = 3, 18
_LARGEST_REPLY_BYTES = 1 << 20
# Highest metadata level that each release speaks; the release itself is nowhere in the protocol.
_RELEASES = {21: "3.9", 25: "4.0", 27: "4.1", 29: "4.2", 30: "4.3", 33: "4.4"}


def serves(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether a broker serves clients: it names at least one live broker in its metadata.

    An open port is not enough: it opens long before the controller lets the broker work.
    """
    try:
        reply = _ask(host, port, _METADATA, 1, struct.pack(">i", 0), timeout_s)  # version 1; no topics
        (brokers,) = struct.unpack_from(">i", reply)
    except (OSError, EOFError, struct.error):
        return False
    return bool(brokers >= 1)


def release(host: str, port: int, timeout_s: float = 3.0) -> str:
    """The broker's release, as far as it can be told: `4.2`, or `unknown (metadata level 99)`.

    Raises OSError or EOFError when it does not answer, ValueError when the answer is not Kafka's.
    """
    text = b"offsetrl"
    body = bytes([0, len(text) + 1]) + text + bytes([len(text) + 1]) + text + b"\0"  # flexible header, names, tags
    try:
        level = _metadata_level(_ask(host, port, _API_VERSIONS, 3, body, timeout_s))
    except (IndexError, struct.error) as error:
        raise ValueError(f"{host}:{port} answers, but not as a Kafka broker") from error
    if level is None:
        return "older than 3.3"
    for highest, name in _RELEASES.items():
        if level <= highest:
            return name if level > 19 else f"older than 3.8 (metadata level {level})"
    return f"unknown (metadata level {level})"


def _ask(host: str, port: int, api: int, version: int, body: bytes, timeout_s: float) -> bytes:
    """Send one request and return the reply's body."""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        request = struct.pack(">hhih", api, version, 7, 8) + b"offsetrl" + body
        connection.sendall(struct.pack(">i", len(request)) + request)
        length, correlation = struct.unpack(">ii", _exactly(connection, 8))
        if correlation != 7 or not 4 < length <= _LARGEST_REPLY_BYTES:
            raise EOFError(f"{host}:{port} does not speak Kafka's protocol")
        return _exactly(connection, length - 4)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or raise EOFError."""
    got = bytearray()
    while len(got) < count:
        if not (more := connection.recv(count - len(got))):
            raise EOFError("the connection was closed")
        got += more
    return bytes(got)


def _metadata_level(reply: bytes) -> int | None:
    """Highest `metadata.version` that the broker supports, from an ApiVersions v3 reply."""
    position = 2  # the error code
    num_apis, position = _varint(reply, position)
    for _ in range(num_apis - 1):
        position = _after_tags(reply, position + 6)
    position += 4  # throttle time
    for tag, start in _tags(reply, position):
        if tag == 0:  # supported features
            return dict(_features(reply, start)).get("metadata.version")
    return None


def _features(reply: bytes, position: int) -> Iterator[tuple[str, int]]:
    """(name, highest version) of each supported feature."""
    count, position = _varint(reply, position)
    for _ in range(count - 1):
        length, position = _varint(reply, position)
        name = reply[position : position + length - 1].decode(errors="replace")
        _lowest, highest = struct.unpack_from(">hh", reply, position + length - 1)
        position = _after_tags(reply, position + length - 1 + 4)
        yield name, highest


def _tags(reply: bytes, position: int) -> Iterator[tuple[int, int]]:
    """(tag, position of its value) of each tagged field."""
    count, position = _varint(reply, position)
    for _ in range(count):
        tag, position = _varint(reply, position)
        size, position = _varint(reply, position)
        yield tag, position
        position += size


def _after_tags(reply: bytes, position: int) -> int:
    """Position after a block of tagged fields."""
    count, position = _varint(reply, position)
    for _ in range(count):
        _tag, position = _varint(reply, position)
        size, position = _varint(reply, position)
        position += size
    return position


def _varint(reply: bytes, position: int) -> tuple[int, int]:
    """(unsigned number of variable length, position after it).

    >>> _varint(bytes([0xAC, 0x02]), 0)
    (300, 2)
    """
    value = shift = 0
    while True:
        byte = reply[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
