"""One real broker and one real object store for a whole test session, started when first asked for.

    from support.servers import session_bootstrap, session_s3

They live in a temporary folder. A keeper process stops them and removes the folder when the session ends in any way,
SIGKILL included: it waits for the end of its standard input.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from infra.embedded import servers
from infra.settings import EmbeddedTable

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "offsetrl-tests"
KEEPER = """
import pathlib, shutil, sys
from infra.embedded import servers
sys.stdin.read()
state = pathlib.Path(sys.argv[1])
servers.down(state)
shutil.rmtree(state, ignore_errors=True)
"""


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """A real object store for tests."""

    url: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str


@cache
def session_state() -> Path:
    """State folder of this process's test servers, cleared away by a keeper process."""
    state, keeper = _keep("offsetrl-tests-")
    atexit.register(_let_go, keeper)
    return state


@contextmanager
def kept_state(prefix: str) -> Iterator[Path]:
    """A state folder for servers that a test may kill; they stop and the folder goes, however this process ends."""
    state, keeper = _keep(prefix)
    try:
        yield state
    finally:
        _let_go(keeper)


def _keep(prefix: str) -> tuple[Path, subprocess.Popen[bytes]]:
    state = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(state)], stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    return state, keeper


def _let_go(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait(60)


def stop_session_servers() -> None:
    """Stop them now; the folder goes at exit."""
    if session_state.cache_info().currsize:
        servers.down(session_state())
    session_bootstrap.cache_clear()
    session_s3.cache_clear()


@cache
def session_bootstrap() -> str:
    """host:port of the session's broker."""
    return servers.up(EmbeddedTable(state=session_state()), BUCKET, only=(servers.KAFKA,)).bootstrap_servers


@cache
def session_s3() -> S3Endpoint:
    """The session's object store, with a bucket."""
    found = servers.up(EmbeddedTable(state=session_state()), BUCKET, only=(servers.S3,))
    return S3Endpoint(found.s3_url, found.access_key, found.secret_key, BUCKET)
