"""The embedded object store: S3Proxy over a folder, loopback only, with random keys that stay the same.

Its folder holds `data/BUCKET/` (the objects, kept), `s3proxy.properties`, `credentials.json` (both readable by the
owner alone) and `output.log`.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from infra.embedded.java import Java, sharing_flags
from infra.embedded.ports import HOST

MAX_SINGLE_PUT_BYTES = 256 * 1024 * 1024
"""Largest object in one request; it is held in memory while its signature is checked. Larger ones come in parts."""
HEAP_MB = 768


class Credentials(NamedTuple):
    """Access key and secret key."""

    access_key: str
    secret_key: str


def credentials(folder: Path) -> Credentials:
    """The keys of this folder, drawn at random the first time."""
    path = folder / "credentials.json"
    if path.exists():
        return Credentials(**json.loads(path.read_text()))
    keys = Credentials(secrets.token_hex(10).upper(), secrets.token_urlsafe(30))
    write_private(path, json.dumps(keys._asdict()))
    return keys


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)


def properties(data: Path, port: int, keys: Credentials) -> dict[str, str]:
    """The server's whole configuration, by S3Proxy's own names."""
    return {
        "s3proxy.endpoint": f"http://{HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": keys.access_key,
        "s3proxy.credential": keys.secret_key,
        "s3proxy.ignore-unknown-headers": "true",  # without it, conditional puts are answered 501
        "s3proxy.v4-max-non-chunked-request-size": str(MAX_SINGLE_PUT_BYTES),
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(data),
    }


def prepare(folder: Path, port: int, bucket: str) -> Path:
    """Write the configuration, make the bucket (a folder of the data folder), and return the configuration's path."""
    data = folder / "data"
    (data / bucket).mkdir(parents=True, exist_ok=True)
    config = folder / "s3proxy.properties"
    lines = properties(data, port, credentials(folder)).items()
    write_private(config, "".join(f"{key}={value}\n" for key, value in lines))
    return config


def command(java: Java, jar: Path, folder: Path, marks: Mapping[str, str]) -> list[str]:
    """The command line that runs the store; `marks` become system properties, by which it is known again."""
    return [
        str(java.path),
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:-UsePerfData",
        *sharing_flags(java, jar.stem, folder),
        f"-Xmx{HEAP_MB}m",
        "-Djava.awt.headless=true",
        *(f"-D{name}={value}" for name, value in marks.items()),
        "-jar",
        str(jar),
        "--properties",
        str(folder / "s3proxy.properties"),
    ]


def answers(port: int, timeout_s: float = 1.0) -> bool:
    """Whether a web server on this port answers at all; without a signature the answer is a refusal."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
