"""An engine without a model, for tests: tokens come from a seeded rule or from a given function, at a given pace.

Knows no torch. By the seeded rule tokens are uniform over the vocabulary, so that their log-prob is exactly
-log(vocabulary); the answers of a given function are certain, log-prob 0. Swaps change nothing but the versions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.settings import RolloutTable
from producers.engine import Generation, GenerationRequest
from producers.engine_parts.answer import Answer
from producers.engine_parts.stepped import SteppedEngine
from producers.engine_parts.swap import Swap, swap_mode
from producers.engines import model_config
from producers.tokenizer import eos_ids
from schemas.records import Finish, Version
from schemas.seeds import derive_seed

AnswerRule = Callable[[GenerationRequest], Sequence[int]]


def make(
    folder: Path, version: Version, table: RolloutTable, *, step_s: float = 0.0, swap: str = "keep"
) -> ScriptedEngine:
    """Answer by the seeded rule over the vocabulary of the model in `folder`; each step sleeps `step_s` seconds.

    `swap` is `keep`, `recompute` or `finish`: `producers.engine_parts.swap`.
    """
    return ScriptedEngine(
        version,
        vocab_size=int(model_config(folder)["vocab_size"]),
        stop_ids=eos_ids(folder),
        max_model_len=table.max_model_len,
        max_running=table.concurrency,
        step_s=step_s,
        swap=swap_mode(swap),
    )


@dataclass
class _Script:
    """What one request will be given, and how far it is."""

    tokens: Sequence[int]
    logprob: float
    finish: Finish
    answer: Answer = field(default_factory=Answer)


class ScriptedEngine(SteppedEngine):
    """Gives each running request one token of its script per step."""

    def __init__(
        self,
        version: Version,
        *,
        answer: AnswerRule | None = None,
        vocab_size: int = 16,
        stop_ids: Sequence[int] = (1,),
        max_model_len: int = 256,
        max_running: int = 64,
        step_s: float = 0.0,
        swap: Swap = Swap.KEEP,
    ) -> None:
        super().__init__(
            version, max_model_len=max_model_len, max_running=max_running, vocab_size=vocab_size, swap=swap
        )
        self._answer, self._stop_ids, self._step_s = answer, tuple(stop_ids), step_s
        self._scripts: dict[str, _Script] = {}

    def step(self) -> list[Generation]:
        """Give one token to each request that runs; returns those that finished. Raises EngineError."""
        if self._step_s:
            time.sleep(self._step_s)
        return super().step()

    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        self._scripts.update({request.id: self._script(request) for request in requests})

    def _advance(self) -> list[Generation]:
        finished = []
        for request_id, script in list(self._scripts.items()):
            script.answer.add(script.tokens[len(script.answer.tokens)], script.logprob, self._version)
            if len(script.answer.tokens) == len(script.tokens):
                finished.append(script.answer.generation(request_id, script.finish, request_id in self._old_kv))
                del self._scripts[request_id]
        return finished

    def _forget(self, request_id: str) -> None:
        del self._scripts[request_id]

    def _so_far(self, request_id: str) -> Generation:
        return self._scripts[request_id].answer.generation(request_id, Finish.ABORT, request_id in self._old_kv)

    def _load(self, folder: Path, version: Version) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")

    def _let_go(self) -> None:
        self._scripts = {}

    def _script(self, request: GenerationRequest) -> _Script:
        limit = self._limit(request)
        if self._answer is None:
            drawn: Sequence[int] = [derive_seed(request.seed, index) % self._vocab_size for index in range(limit)]
            logprob = -math.log(self._vocab_size)
        else:
            drawn, logprob = list(self._answer(request)), 0.0
        ends = [index + 1 for index, token in enumerate(drawn) if token in self._stop_ids]
        length = min([*ends, len(drawn), limit])
        finish = Finish.STOP if ends and ends[0] == length else Finish.LENGTH
        return _Script(drawn[:length], logprob, finish)
