"""Questions to the cluster, each within the log's patience, asked by whichever thread.

One admin client is shared under a lock and thrown away after any error (it remembers coordinators that have moved);
each call runs in a thread that is left behind when it hangs, since the client's own calls know no limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from infra._background import in_background, within
from infra._kafka_diagnosis import Unreachable, said
from schemas.errors import BrokerError

T = TypeVar("T")
_REST_S = 0.1


@dataclass(frozen=True, slots=True)
class Faults:
    """Error types of the client while it talks: all of them, and those after which another attempt may succeed."""

    all: tuple[type[Exception], ...]
    passing: tuple[type[Exception], ...]


class Asker:
    """Asks an admin client, made when first needed by `make`."""

    def __init__(
        self, make: Callable[[], Any], faults: Faults, *, patience_s: float, where: str, mask: Callable[[str], str]
    ) -> None:
        self._make, self._faults, self._patience_s = make, faults, patience_s
        self._caught: tuple[type[Exception], ...] = (Unreachable, *faults.all)
        self._where, self._mask = where, mask
        self._lock = threading.Lock()
        self._admin: Any = None
        self._met = False  # whether the cluster has ever answered: only then is it worth waiting for

    def ask(self, what: str, question: Callable[[Any], T]) -> T:
        """The answer to a question. Raises BrokerError: at once when the cluster was never there, or refuses."""
        deadline_s = time.monotonic() + self._patience_s
        if not self._lock.acquire(timeout=self._patience_s):
            raise BrokerError(
                f"{what}: an earlier question to Kafka at {self._where} has not ended within the patience"
            )
        try:
            while True:
                try:
                    return self._ask_once(what, question, deadline_s)
                except self._caught as error:
                    self._drop()
                    may_pass = self._met if isinstance(error, Unreachable) else isinstance(error, self._faults.passing)
                    if not may_pass or time.monotonic() + 2 * _REST_S > deadline_s:
                        raise self._unanswered(what, error) from None
                    time.sleep(_REST_S)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Let go of the client; a question still being asked ends with an error."""
        self._drop()

    def _ask_once(self, what: str, question: Callable[[Any], T], deadline_s: float) -> T:
        """One attempt; the caller holds the lock."""
        if self._admin is None:
            self._admin = self._make()
        admin = self._admin
        answer = within(what, lambda: question(admin), deadline_s - time.monotonic())
        self._met = True
        return answer

    def _unanswered(self, what: str, error: Exception) -> BrokerError:
        """The error for a question that got no answer."""
        if isinstance(error, Unreachable):
            return error
        outcome = "gave no answer" if isinstance(error, self._faults.passing) else "refused"
        return BrokerError(self._mask(f"{what}: Kafka at {self._where} {outcome} ({said(error)})"))

    def _drop(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            in_background("close a Kafka admin client", admin.close)
