"""Turns of a trainer that survive a log or a store that is away: after an error a new claim and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from infra.heartbeat import Heart
from schemas.errors import BrokerError, DeadlineExceeded, SendFailed, StoreError
from schemas.records import State

_BACKOFF_S = (0.5, 10.0)
_DISTURBED = (BrokerError, StoreError, SendFailed, DeadlineExceeded)
_LOG = structlog.get_logger("offsetrl.train")


class Claimed(Protocol):
    """One claim's worth of training."""

    def take_over(self) -> None:
        """Load, claim, catch up."""

    def turn(self) -> None:
        """Read, plan, execute."""

    def end(self) -> None:
        """Set aside what is left and save."""

    def close(self) -> None:
        """Let go of the connections."""


class Turns:
    """Turns that survive a log or a store that is away: after any error a new claim, and the newest checkpoint."""

    def __init__(self, make: Callable[[], Claimed], heart: Heart) -> None:
        """`make`: a trainer that has not taken over yet."""
        self._make, self._heart = make, heart
        self._trainer: Claimed | None = None
        self._failures = 0

    def turn(self) -> float:
        """One turn; how long to rest before the next one, in seconds. Raises Superseded."""
        try:
            if self._trainer is None:
                self._heart.beat(State.STARTING)
                self._trainer = self._make()
                self._trainer.take_over()
            self._trainer.turn()
        except _DISTURBED as error:
            self.close()
            if not self._failures:
                _LOG.warning("disturbed; going back to the newest checkpoint", error=str(error))
            self._failures += 1
            return min(_BACKOFF_S[0] * 2.0 ** min(self._failures - 1, 10), _BACKOFF_S[1])
        if self._failures:
            _LOG.info("training again", failures=self._failures)
        self._failures = 0
        return 0.0

    def end(self) -> None:
        """Set aside what is left and save. A failure is harmless: the next trainer does it, from the log."""
        try:
            if self._trainer is not None:
                self._trainer.end()
        except _DISTURBED as error:
            _LOG.warning("the end was disturbed; the next trainer goes on from the log", error=str(error))

    def close(self) -> None:
        """Let go of the connections."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
