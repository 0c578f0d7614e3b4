"""Fixtures for every test: the session's real broker and object store."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from schemas import codec
from support.servers import S3Endpoint, session_bootstrap, session_s3, stop_session_servers


def pytest_configure(config: pytest.Config) -> None:
    """Let the Kafka client be imported: on Python 3.11 it reads its own resources in a deprecated way."""
    for theirs in ("ignore::DeprecationWarning:kafka.*", "ignore:open_text is deprecated:DeprecationWarning"):
        config.addinivalue_line("filterwarnings", theirs)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that configures logging, as every command does, changes nothing for the next one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _schemas_as_they_were() -> Iterator[None]:
    """A writer's schema that a test learns stays unknown to the next one, as in a process of its own."""
    known, before = codec._READERS, dict(codec._READERS)
    yield
    known.clear()
    known.update(before)


@pytest.fixture(scope="session")
def bootstrap(_servers: None) -> str:
    """host:port of one real broker, shared by the whole session: use topics of your own."""
    return session_bootstrap()


@pytest.fixture(scope="session")
def s3_endpoint(_servers: None) -> S3Endpoint:
    """One real object store, shared by the whole session: use prefixes of your own."""
    return session_s3()


@pytest.fixture(scope="session")
def _servers() -> Iterator[None]:
    yield
    stop_session_servers()
