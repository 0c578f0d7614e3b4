"""An engine under test beside the weights it holds, prompts for it, and how far its log-probs are from transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.settings import RolloutTable
from producers.engine import Engine, Generation, GenerationRequest
from producers.engine_parts.swap import Swap, SwapQueue
from producers.engines import make_engine
from schemas.records import Sampling, Version, VersionRun
from support.models import POSITIONS, model_folder, token_logprobs

EOS, VOCAB = 1, 26
TOLERANCE = 1e-3
CONCURRENCY = 64


class Bench:
    """An engine and its weights; a new one is started when a test has broken the last."""

    def __init__(self, name: str, tie: bool) -> None:
        self.name, self.tie = name, tie
        self.seed = 0
        self._count = 0
        self._broken = True
        self._engine: Engine | None = None

    @property
    def folder(self) -> Path:
        """The weights loaded last."""
        return self.weights(self.seed)

    def weights(self, seed: int) -> Path:
        return model_folder(seed, tie=self.tie)

    @property
    def engine(self) -> Any:
        if self._broken:
            self.close()
            table = RolloutTable(max_model_len=POSITIONS, concurrency=CONCURRENCY)
            self._engine = make_engine(self.name, folder=self.folder, version=Version(1, self._count), table=table)
            self._broken = False
        return self._engine

    def use(self, engine: Engine) -> None:
        """Put an engine of another kind, with the same weights, under test."""
        self._engine, self._broken = engine, False

    @contextmanager
    def mode(self, swap: str) -> Iterator[None]:
        """What running requests do at a swap, for a while: as if the engine had been started with the setting."""
        assert self.engine._swaps.mode == "keep", "the default"
        self.engine._swaps = SwapQueue(Swap(swap))
        yield
        self.engine._swaps = SwapQueue(Swap.KEEP)

    def swap(self, seed: int) -> Version:
        """Load the weights of another seed as the next version."""
        self._count += 1
        self.seed = seed
        self.engine.load(self.folder, Version(1, self._count))
        return Version(1, self._count)

    def spoil(self) -> None:
        self._broken = True

    def check_left_idle(self) -> None:
        """A test that failed half-way must not fail the next ones: they get a new engine."""
        if not self._broken and (self.engine.num_running or self.engine._swaps.mode != "keep"):
            self.spoil()

    def submit(self, id: str, prompt: Sequence[int], *, seed: int = 0, **sampling: Any) -> None:
        chosen = Sampling(**{"max_tokens": 12, **sampling})
        self.engine.submit(GenerationRequest(id=id, prompt=tuple(prompt), sampling=chosen, seed=seed))

    def drain(self) -> dict[str, Generation]:
        found: dict[str, Generation] = {}
        for _ in range(10_000):
            if not self.engine.num_running:
                return found
            found.update({generation.id: generation for generation in self.engine.step()})
        raise AssertionError(f"{self.engine.num_running} requests never finished")

    def one(self, prompt: Sequence[int], **options: Any) -> Generation:
        self.submit("one", prompt, **options)
        return self.drain()["one"]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._broken = True


KINDS = [("scripted", True), ("transformers", True), ("transformers", False), ("vllm", True), ("vllm", False)]


def _cases(*wanted: tuple[str, bool]) -> pytest.MarkDecorator:
    """The same objects each time: pytest then sees one engine where it would see several, and starts it once."""
    marks = {kind: () if kind[0] == "scripted" else (pytest.mark.model,) for kind in KINDS}
    cases = [
        pytest.param(kind, id=f"{kind[0]}-{'tied' if kind[1] else 'untied'}", marks=marks[kind])
        for kind in KINDS
        if kind in wanted
    ]
    return pytest.mark.parametrize("bench", cases, indirect=True, scope="session")


def engine(name: str, tie: bool) -> pytest.MarkDecorator:
    """Run a test on one engine alone."""
    return _cases((name, tie))


every_engine = _cases(*KINDS)
with_weights = _cases(*KINDS[1:])
every_mode = pytest.mark.parametrize("swap", [mode.value for mode in Swap])


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Ids of digits, different for different starts."""
    return [2 + (start + 3 * place + place * place) % 10 for place in range(length)]


def run_of(version: Version, count: int) -> VersionRun:
    return VersionRun(version.epoch, version.version, count)


def seed_of_tokens(bench: Bench, num: int = 3, start: int = 3) -> int:
    """A seed with which `prompt_of(6, start)` is continued by at least so many tokens."""
    return next(s for s in range(200) if len(bench.one(prompt_of(6, start), seed=s, max_tokens=num).tokens) == num)


def deviation_of_one(bench: Bench, prompt: Sequence[int]) -> float:
    """Greatest distance, in nats, of one fresh generation's log-probs from those of the weights in use."""
    generation = bench.one(prompt, seed=5)
    return deviation(generation, token_logprobs(bench.folder, prompt, generation.tokens))


def deviation(generation: Generation, wanted: Sequence[float]) -> float:
    return max(abs(got - want) for got, want in zip(generation.logprobs, wanted, strict=True))
