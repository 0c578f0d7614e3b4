"""No lines of daemons that run inside a test and go through hundreds of faults there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


@contextmanager
def silence() -> Iterator[None]:
    """Drop every line of the daemons'; logging is as before afterwards."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent
