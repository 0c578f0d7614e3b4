"""Rollouts and steps that take time without computing: seeded lognormal token times, a task without work, a sleeping learner.

They stand in the places of engine, environment, tokenizer and learner; everything around them is the product's own.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy

import producers.rollout_worker
import trainers.trainer
from infra.daemon import Daemon
from infra.settings import RolloutTable
from producers.engine import Generation, GenerationRequest
from producers.engine_parts.answer import Answer
from producers.engine_parts.swap import SwapQueue, swap_mode
from producers.environment import Observation, Verdict
from producers.groups import group_number
from schemas.records import Finish, Outcome, Plan, Status, Version
from schemas.rules.ledger import Ledger
from schemas.seeds import derive_seed
from support.loop import Codec
from trainers.backlog import SamplesPosition
from trainers.beside import beside

Z_99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a whole generation takes: lognormal, with this mean in seconds and this p99 / median.

    Every `cycle` rollouts in the order of dispatch (a batch) take the same durations, the quantiles of the distribution,
    each time in another seeded order: how long batches take then differs little between seeds.
    """

    mean_s: float
    tail: float = 1.0
    cycle: int = 512
    group_size: int = 8
    seed: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: p99 / median = exp(2.326 sigma).

        >>> round(Pace(1.0, 10.0).sigma, 2), round(Pace(1.0, 3.2).sigma, 2)
        (0.99, 0.5)
        """
        return math.log(self.tail) / Z_99

    def seconds(self, group: int, index: int) -> float:
        """The duration of a member's rollout.

        >>> pace = Pace(0.5, 10.0, cycle=16)
        >>> sorted(pace.seconds(0, i) for i in range(16)) == sorted(pace.seconds(2, i) for i in range(16))
        True
        >>> round(sum(pace.seconds(0, i) for i in range(16)) / 16, 6)
        0.5
        """
        turn, place = divmod(group * self.group_size + index, self.cycle)
        return _order(self, turn)[place]


@functools.cache
def _order(pace: Pace, turn: int) -> list[float]:
    """The durations of one cycle."""
    normal = NormalDist()
    drawn = [math.exp(pace.sigma * normal.inv_cdf((i + 0.5) / pace.cycle)) for i in range(pace.cycle)]
    scale = pace.mean_s * pace.cycle / sum(drawn)
    random.Random(derive_seed(pace.seed, "pace", turn)).shuffle(drawn)
    return [scale * one for one in drawn]


@dataclass(slots=True)
class _Script:
    """A running request: one token each `token_s` from `begun_s` on."""

    begun_s: float
    token_s: float
    num_tokens: int
    answer: Answer = field(default_factory=Answer)

    @property
    def end_s(self) -> float:
        return self.begun_s + self.token_s * self.num_tokens


def make_engine(
    folder: Path,
    version: Version,
    table: RolloutTable,
    *,
    pace: Mapping[str, Any],
    num_tokens: int = 8,
    tick_s: float = 0.02,
    swap: str = "keep",
) -> PacedEngine:
    """An engine whose generations of `num_tokens` tokens take what `Pace(**pace)` says; a swap takes no time."""
    return PacedEngine(version, Pace(**pace), num_tokens, tick_s, SwapQueue(swap_mode(swap)))


class PacedEngine:
    """Sleeps until the next answer is complete, `tick_s` seconds at most; tokens carry the version of their time."""

    def __init__(self, version: Version, pace: Pace, num_tokens: int, tick_s: float, swaps: SwapQueue) -> None:
        self.version = version
        self._pace, self._num_tokens, self._tick_s, self._swaps = pace, num_tokens, tick_s, swaps
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: dict[str, _Script] = {}

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Add a request; it begins at once unless weights wait for those that run."""
        self._waiting[request.id] = request
        self._begin()

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)
        self._swap_when_due()

    def progress(self, request_id: str) -> Generation | None:
        """The tokens so far."""
        if (script := self._running.get(request_id)) is not None:
            return script.answer.generation(request_id, Finish.ABORT)
        return Answer().generation(request_id, Finish.ABORT) if request_id in self._waiting else None

    def step(self) -> list[Generation]:
        """Sleep, then give every request the tokens that are due."""
        next_s = min((script.end_s for script in self._running.values()), default=math.inf)
        time.sleep(max(0.0, min(self._tick_s, next_s - time.monotonic())))
        now = time.monotonic()
        finished = []
        for request_id, script in list(self._running.items()):
            due = min(script.num_tokens, int((now - script.begun_s) / script.token_s + 1e-6))
            for _ in range(due - len(script.answer.tokens)):
                script.answer.add(0, 0.0, self.version)
            if due == script.num_tokens:
                del self._running[request_id]
                finished.append(script.answer.generation(request_id, Finish.STOP))
        self._swap_when_due()
        return finished

    def load(self, folder: Path, version: Version) -> None:
        """Take over a version."""
        self._swaps.offer(folder, version)
        self._swap_when_due()

    def close(self) -> None:
        """Forget everything."""
        self._waiting, self._running = {}, {}

    def _begin(self) -> None:
        if self._swaps.holds_back:
            return
        now = time.monotonic()
        for request_id, request in self._waiting.items():
            token_s = self._pace.seconds(*_member(request_id)) / self._num_tokens
            self._running[request_id] = _Script(now, token_s, request.sampling.max_tokens)
        self._waiting.clear()

    def _swap_when_due(self) -> None:
        if (due := self._swaps.due(len(self._running))) is not None:
            self.version = due[1]
        self._begin()


def _member(request_id: str) -> tuple[int, int]:
    """Group and index of the member that a generation is for.

    >>> _member("g00000012/3/0/1")
    (12, 3)
    """
    group, index, *_ = request_id.split("/")
    number = group_number(group)
    assert number is not None, request_id
    return number, int(index)


class PacedSession:
    """One prompt, one answer; the reward comes from the seed."""

    done = False

    def __init__(self, seed: int) -> None:
        self._reward = float(seed % 2)

    def observe(self) -> Observation:
        """One token."""
        return Observation(text=">")

    def act(self, text: str, truncated: bool) -> None:
        """Whatever it is, it was the last."""
        self.done = True

    def verdict(self) -> Verdict:
        """A coin."""
        return Verdict(status=Status.OK, reward=self._reward)


class PacedEnvironment:
    """Endless items, all alike."""

    num_items: int | None = None
    rebuildable = True

    def payload(self, item: int) -> str:
        """Nothing."""
        return ""

    def open(self, item: int, payload: str, seed: int) -> PacedSession:
        """A session that costs nothing."""
        return PacedSession(seed)


def make_environment(seed: int) -> PacedEnvironment:
    """The task without work."""
    return PacedEnvironment()


class PacedLearner:
    """Weights are their version; executing a plan sleeps `step_s` and nothing is saved."""

    config_digest = "cd" * 32

    def __init__(self, step_s: float) -> None:
        self.version, self._step_s = 0, step_s

    @property
    def digest(self) -> str:
        """As long as a real one."""
        return f"{self.version:064x}"

    def load(self, ledger: Ledger, *, first: bool) -> Mapping[int, SamplesPosition]:
        """Go on from the version in memory; samples are read from their beginning."""
        return {}

    def execute(
        self, plan: Plan, outcomes: Sequence[Outcome], meanwhile: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Sleep, beside what is done meanwhile."""
        beside(lambda: time.sleep(self._step_s), meanwhile or (lambda: None))
        self.version = plan.step + 1
        return {}

    def rest(self) -> None:
        """There are no other ranks."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """To nobody."""

    def close(self) -> None:
        """Nothing is held."""

    def files(self) -> dict[str, bytes | Path]:
        """One small tensor."""
        return {"model.safetensors": safetensors.numpy.save({"w": np.full(16, self.version, dtype=np.float32)})}

    def first_files(self) -> dict[str, bytes | Path]:
        """The same and a configuration."""
        return {"config.json": b"{}", **self.files()}

    def checkpoint(self, offset: int, plan: Plan, samples: Mapping[int, SamplesPosition], *, force: bool) -> None:
        """Nothing."""

    def checkpoint_now(self, samples: Mapping[int, SamplesPosition], ledger: Ledger) -> None:
        """Nothing."""


@contextmanager
def paced_parts(step_s: float) -> Iterator[None]:
    """Let the daemons of this process use the character tokenizer and a learner that sleeps."""

    own = PacedLearner(step_s)  # one for good: a trainer that begins again finds its weights as they were

    def learner(daemon: Daemon) -> PacedLearner:
        return own

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(producers.rollout_worker, "Tokenizer", Codec))
        stack.enter_context(mock.patch.object(trainers.trainer, "make_learner", learner))
        yield
