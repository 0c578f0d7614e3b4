"""Ports on loopback: which are free, and who holds one that is not.

All are below 32768: above it, the system hands numbers to outgoing connections, and one of those may hold a server's
port when the server wants it back.
"""

from __future__ import annotations

import random
import socket

import psutil

HOST = "127.0.0.1"
LOWEST, HIGHEST = 20000, 32767


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as Java does: leftovers of old connections are fine
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def find_free(count: int, avoid: frozenset[int] = frozenset()) -> list[int]:
    """`count` different free ports, drawn at random so that two processes that look at once seldom meet.

    Raises OSError when a thousand draws do not find enough.
    """
    found: list[int] = []
    for _ in range(1000):
        if len(found) == count:
            return found
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        if port not in avoid and port not in found and is_free(port):
            found.append(port)
    raise OSError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {HOST}")


def holder(port: int) -> str:
    """Who listens on a loopback port, for an error text: `name (pid N)`, or that it is not known."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process that this user may not see"
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            return _describe(connection.pid)
    return "no listener that this user can see"


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
