"""An environment with slow and hung tools: every turn ends with a tool call that sleeps, some twenty times longer, some for ever."""

from __future__ import annotations

import asyncio
import random

from producers.environment import Observation, Verdict
from schemas.records import Role, Status
from schemas.seeds import derive_seed

NEVER_S = 1e6


class ToolSession:
    """So many turns, a tool call after each; how long the calls take comes from the seed."""

    def __init__(self, seed: int, calls_s: list[float]) -> None:
        self._reward, self._calls_s = float(seed % 2), calls_s
        self._turn = 0

    @property
    def done(self) -> bool:
        """After the last call."""
        return self._turn == len(self._calls_s)

    def observe(self) -> Observation:
        """One token: the question, later the tool's answer."""
        return Observation(text=">", role=Role.TOOL if self._turn else Role.PROMPT)

    async def act(self, text: str, truncated: bool) -> None:
        """The tool is called."""
        await asyncio.sleep(self._calls_s[self._turn])
        self._turn += 1

    def verdict(self) -> Verdict:
        """A coin."""
        return Verdict(status=Status.OK, reward=self._reward)


class Tools:
    """Endless items, all alike."""

    num_items: int | None = None

    def __init__(self, turns: int, call_s: float, slow: float, slower: float, hung: float) -> None:
        self._turns, self._call_s = turns, call_s
        self._slow, self._slower, self._hung = slow, slower, hung

    def payload(self, item: int) -> str:
        """Nothing."""
        return ""

    def open(self, item: int, payload: str, seed: int) -> ToolSession:
        """A session whose calls are drawn from its seed."""
        return ToolSession(seed, self.calls_s(seed))

    def calls_s(self, seed: int) -> list[float]:
        """Seconds of each call.

        >>> Tools(3, 0.1, slow=0.0, slower=20.0, hung=0.0).calls_s(5)
        [0.1, 0.1, 0.1]
        >>> Tools(1, 0.1, slow=1.0, slower=20.0, hung=0.0).calls_s(5), Tools(1, 0.1, 0.0, 20.0, hung=1.0).calls_s(5)
        ([2.0], [1000000.0])
        """
        draw = random.Random(derive_seed(seed, "tools"))
        return [self._one(draw.random()) for _ in range(self._turns)]

    def _one(self, drawn: float) -> float:
        if drawn < self._hung:
            return NEVER_S
        return self._call_s * (self._slower if drawn < self._hung + self._slow else 1.0)


def make_environment(
    seed: int, *, turns: int = 2, call_s: float = 0.2, slow: float = 0.05, slower: float = 20.0, hung: float = 0.0
) -> Tools:
    """Calls take `call_s` seconds, a share `slow` of them `slower` times as long, and a share `hung` never ends."""
    return Tools(turns, call_s, slow, slower, hung)
