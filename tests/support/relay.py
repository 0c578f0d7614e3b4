"""A TCP relay on loopback that can cut, swallow or refuse: the network at its worst, one port wide.

    with Relay() as relay:                       # speaks SOCKS5: the client names its target
        log = KafkaLog(bootstrap, client={"proxy_url": relay.socks_url})
    with Relay(("127.0.0.1", port)) as relay:    # or a plain relay to one target: connect to relay.port

A Kafka client goes to whatever address the broker advertises, so a plain relay would see its first connection only;
as a SOCKS5 proxy the relay sees all of them. It knows nothing of the bytes it carries.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal

from infra.embedded import ports

Mode = Literal["pass", "hole", "refuse"]


class Relay:
    """A relay in threads of its own. `mode` may be changed at any time."""

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self.target = target
        self.mode: Mode = "pass"
        """pass; hole (bytes are swallowed, connections stay open); refuse (new connections are closed)."""
        self.num_connections = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        (self.port,) = ports.find_free(1)
        self._listener = socket.create_server((ports.HOST, self.port))
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="relay").start()

    @property
    def socks_url(self) -> str:
        """The relay as a client's `proxy_url`."""
        return f"socks5://{ports.HOST}:{self.port}"

    def cut(self) -> None:
        """Close every connection that is open now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close everything, the listener too."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True, name="relay-connection").start()

    def _serve(self, client: socket.socket) -> None:
        """Connect a client to its target and carry bytes until either end closes."""
        try:
            server = socket.create_connection(self.target or _socks_target(client), timeout=5)
            if self.target is None:
                client.sendall(b"\x05\x00\x00\x01" + bytes(6))
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self.num_connections += 1
            self._pairs.append((client, server))
        back = threading.Thread(target=self._carry, args=(server, client), daemon=True, name="relay-back")
        back.start()
        self._carry(client, server)
        back.join()
        client.close()
        server.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Bytes from one to the other; the end of one is the end of both."""
        with suppress(OSError):
            while data := source.recv(65536):
                if self.mode != "hole":
                    sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _socks_target(client: socket.socket) -> tuple[str, int]:
    """The target that a SOCKS5 client names; no authentication."""
    _, num_methods = _exactly(client, 2)
    _exactly(client, num_methods)
    client.sendall(b"\x05\x00")
    _, _, _, kind = _exactly(client, 4)
    if kind == 1:
        host = socket.inet_ntoa(_exactly(client, 4))
    elif kind == 3:
        host = _exactly(client, _exactly(client, 1)[0]).decode()
    else:
        host = socket.inet_ntop(socket.AF_INET6, _exactly(client, 16))
    return host, int.from_bytes(_exactly(client, 2), "big")


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise OSError("the client went away")
        data += more
    return data
