"""Logs go to stderr: readable on a terminal, one JSON object per line elsewhere; secrets never.

`log = structlog.get_logger()` in any module; `configure` is called once, at a process's start. Fields that apply
everywhere (role, run, policy, name, region) are bound there; topic, partition, offset and version are given per line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from infra.secrecy import redact

# kafka-python logs each reconnect, botocore its credentials' source, vllm each of its settings
_QUIET = {"kafka": logging.WARNING, "botocore": logging.WARNING, "boto3": logging.WARNING, "urllib3": logging.WARNING}
_CHATTY = {"vllm": logging.WARNING, "transformers": logging.WARNING, "accelerate": logging.WARNING}


class _Redacting(logging.Formatter):
    """Formats through another formatter and hides secrets in the result, tracebacks included."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redact(self._inner.format(record))


def configure(verbosity: int = 0, fields: Mapping[str, Any] | None = None, stream: TextIO | None = None) -> None:
    """Set up logging of this process: -1 warnings, 0 information, 1 debug, 2 debug and the clients' information."""
    stream = sys.stderr if stream is None else stream
    level = logging.WARNING if verbosity < 0 else logging.INFO if verbosity == 0 else logging.DEBUG
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with(dict(fields or {})),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Redacting(_formatter(shared, terminal=stream.isatty())))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name, least in {**_QUIET, **_CHATTY}.items():
        logging.getLogger(name).setLevel(logging.INFO if verbosity >= 2 else least)


def _formatter(shared: list[Processor], terminal: bool) -> logging.Formatter:
    last: list[Processor]
    if terminal:
        last = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    )


def _with(fields: dict[str, Any]) -> Processor:
    """Adds the process's own fields, below those of the line; a plain processor, so that threads have them too."""

    def add(logger: Any, method: str, event: Any) -> Any:
        return {**fields, **event}

    return add
