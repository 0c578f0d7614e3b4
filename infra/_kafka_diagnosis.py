"""What is wrong with a broker, in words: can it be reached at all, and what did the client say before it gave up?

The client answers a closed port, a wrong password and a missing certificate with the same timeout; the difference
stands only in its log, which also holds passwords and whole records at debug level. So its log is taken over here.
"""

from __future__ import annotations

import collections
import logging
import socket
import time

from infra._kafka_options import masked
from schemas.errors import BrokerError


class Unreachable(BrokerError):
    """No address takes a connection."""


class Ear(logging.Handler):
    """Keeps the client's last warnings, and passes them on at debug level: a broker that is away repeats itself."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.secrets: set[str] = set()
        self._heard: collections.deque[tuple[float, str]] = collections.deque(maxlen=20)
        self._voice = logging.getLogger("infra.kafka_log.client")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, without secrets."""
        text = masked(record.getMessage(), self.secrets)
        self._heard.append((time.monotonic(), text))
        self._voice.debug("%s", text)

    def since(self, when_s: float) -> str:
        """The last two distinct warnings since then, without those that only repeat the error or tell of waiting."""
        texts = dict.fromkeys(text for heard_s, text in list(self._heard) if heard_s >= when_s)
        telling = [text for text in texts if not text.startswith("Bootstrap failed") and "not ready" not in text]
        return "; ".join(telling[-2:]) or "and no more"

    def take_over(self, logger_name: str) -> None:
        """Take a logger over: warnings come here, and nothing else is written."""
        logger = logging.getLogger(logger_name)
        if self not in logger.handlers:
            logger.addHandler(self)
            logger.setLevel(logging.WARNING)
            logger.propagate = False


def said(error: BaseException) -> str:
    """An error's kind and text on one line.

    >>> said(ValueError("too\\nlong"))
    'ValueError: too long'
    """
    kind = type(error).__name__
    text = " ".join(str(error).split())
    return text if text.startswith(kind) else f"{kind}: {text}"


def reach(places: list[tuple[str, int]], timeout_s: float = 4.0) -> None:
    """Raise Unreachable within the time when no address takes a connection; the client would try for much longer."""
    heard = []
    for host, port in places:
        try:
            socket.create_connection((host, port), timeout=max(0.5, timeout_s / 2 / len(places))).close()
        except OSError as error:
            heard.append(f"{host}:{port}: {error}")
        else:
            return
    raise Unreachable(
        f"no Kafka broker can be reached ({'; '.join(heard)}): start the embedded one with `offsetrl up`, or set "
        "kafka.bootstrap_servers to the addresses of your own"
    )
