"""What a doctor can tell without a broker or a store: this machine, whether a port is open, how far two clocks are apart."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from infra.embedded import java
from schemas.errors import SettingError

LEAST_DISK_BYTES = 1024**3
CONNECT_TIMEOUT_S = 3.0
LARGEST_SKEW_S = 5.0
"""Clocks further apart than this make deadlines and ages that are read off them misleading."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` is empty when it is well."""

    name: str
    ok: bool
    got: str
    remedy: str = ""


def check_java() -> Check:
    """A Java for the embedded servers."""
    try:
        found = java.find_java()
    except SettingError as error:
        return Check("java", False, "none that is new enough", str(error))
    return Check("java", True, f"{found.major} from {found.origin}: {found.path}")


def check_disk(name: str, folder: Path, setting: str) -> Check:
    """Free space where a folder is or will be."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    return Check(
        name,
        free >= LEAST_DISK_BYTES,
        f"{free / 1024**3:.1f} GiB free at {there}",
        "" if free >= LEAST_DISK_BYTES else f"needs at least 1 GiB: free some space, or move {setting} to another disk",
    )


def check_crc32c() -> Check:
    """The extension that makes the Kafka client ten times faster."""
    if importlib.util.find_spec("crc32c") is not None:
        return Check("crc32c", True, "installed")
    return Check("crc32c", False, "missing: the Kafka client is ten times slower", "pip install crc32c")


def check_tcp(name: str, address: str, remedy: str) -> Check:
    """Whether something takes connections at host:port."""
    try:
        with socket.create_connection(host_port(address), CONNECT_TIMEOUT_S):
            return Check(name, True, "open")
    except TimeoutError:
        return Check(name, False, f"no answer within {CONNECT_TIMEOUT_S:.0f} s", remedy)
    except (OSError, ValueError) as error:
        return Check(name, False, str(error), remedy)


def compare_clocks(name: str, theirs_s: float, before_s: float, after_s: float) -> Check:
    """Their time against ours around the question; inside that span nothing can be said, so it counts as none."""
    ahead_s = theirs_s - after_s if theirs_s > after_s else min(0.0, theirs_s - before_s)
    ok = abs(ahead_s) <= LARGEST_SKEW_S
    got = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    return Check(name, ok, got if ahead_s else "same as this machine's", "" if ok else "set both by NTP (timedatectl)")


def host_port(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host may stand in brackets.

    >>> host_port("[::1]:9092")
    ('::1', 9092)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
