"""The environment's side of one episode: opens its session, tells it what the model wrote, asks what comes next.

Runs away from the engine's thread (`producers.calls`): whatever is slow or hangs here holds up this episode alone. Methods
of an environment and of its sessions may be `async def`; those of one session are never called two at a time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from producers.environment import Environment, Observation, Session, Verdict
from producers.episode import Failure, Heard, Said
from schemas.records import Request, Status


class Moved:
    """The session turned out to be async: ask again, on the event loop."""


class Conversation:
    """One session, from its opening to its verdict."""

    def __init__(self, environment: Environment, request: Request) -> None:
        self._open = functools.partial(environment.open, request.item, request.payload, request.seed)
        self._session: Session | None = None
        self.on_loop = inspect.iscoroutinefunction(environment.open)
        """Whether `take` must run on an event loop."""
        self.doing = "open"
        """The call that runs, or ran last."""

    async def take(self, said: Said) -> Heard | Moved:
        """Say this, and hear the next observation, or the verdict once the session is done. Raises nothing."""
        try:
            if self._session is None:
                self._session = await _call(self._open)
                if _is_async(self._session) and not self.on_loop:
                    self.on_loop = True
                    return Moved()
            session = self._session
            if said.text is not None:
                self.doing = "act"
                await _call(session.act, said.text, said.truncated)
            self.doing = "done"
            if not session.done:
                if said.last:
                    return Failure(Status.CANCELLED, "")
                self.doing = "observe"
                return _observation(await _call(session.observe))
        except Exception as error:  # noqa: BLE001 - the edge to the environment: any failure of it is one status
            return self._failure(Status.ENV_ERROR, error)
        try:
            self.doing = "verdict"
            return _plain(await _call(session.verdict))
        except Exception as error:  # noqa: BLE001 - the edge to the grader: any failure of it is one status
            return self._failure(Status.GRADER_ERROR, error)

    def _failure(self, status: Status, error: Exception) -> Failure:
        return Failure(status, f"{self.doing}: {type(error).__name__}: {error}")


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    found = function(*arguments)
    return await found if inspect.isawaitable(found) else found


def _is_async(session: Session) -> bool:
    return any(inspect.iscoroutinefunction(getattr(session, name, None)) for name in ("observe", "act", "verdict"))


def _observation(found: Any) -> Observation:
    if not isinstance(found, Observation):
        raise TypeError(f"got {type(found).__name__}, expected an Observation")
    return found


def _plain(verdict: Verdict) -> Verdict:
    """The verdict with Python's own numbers, whatever the grader's library made them of."""
    status = Status(verdict.status)
    if status is Status.UNKNOWN:
        raise ValueError(f"status {status!r} is for readers of records; say how the episode ended")
    return Verdict(
        status=status,
        reward=None if verdict.reward is None else float(verdict.reward),
        parts={str(name): float(part) for name, part in verdict.parts.items()},
        step_rewards=tuple(float(step) for step in verdict.step_rewards),
        error=str(verdict.error),
    )
