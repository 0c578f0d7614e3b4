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
from producers.engines import check_request, model_config
from producers.tokenizer import eos_ids
from schemas.errors import EngineError
from schemas.records import Finish, Version, VersionRun
from schemas.seeds import derive_seed

Answer = Callable[[GenerationRequest], Sequence[int]]


def make(folder: Path, version: Version, table: RolloutTable, *, step_s: float = 0.0) -> ScriptedEngine:
    """Answer by the seeded rule over the vocabulary of the model in `folder`; each step sleeps `step_s` seconds."""
    return ScriptedEngine(
        version,
        vocab_size=int(model_config(folder)["vocab_size"]),
        stop_ids=eos_ids(folder),
        max_model_len=table.max_model_len,
        max_running=table.concurrency,
        step_s=step_s,
    )


@dataclass
class _Script:
    """What one request will be given, and how far it is."""

    request: GenerationRequest
    tokens: Sequence[int]
    logprob: float
    finish: Finish
    runs: list[VersionRun] = field(default_factory=list)
    num_given: int = 0
    old_kv: bool = False


class ScriptedEngine:
    """Gives each running request one token of its script per step."""

    def __init__(
        self,
        version: Version,
        *,
        answer: Answer | None = None,
        vocab_size: int = 16,
        stop_ids: Sequence[int] = (1,),
        max_model_len: int = 256,
        max_running: int = 64,
        step_s: float = 0.0,
    ) -> None:
        self._version = version
        self._answer = answer
        self._vocab_size, self._stop_ids = vocab_size, tuple(stop_ids)
        self._max_model_len, self._max_running, self._step_s = max_model_len, max_running, step_s
        self._scripts: dict[str, _Script] = {}
        self._usable = True

    @property
    def version(self) -> Version:
        """The weights that the next step claims to sample from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._scripts)

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError for a prompt that cannot be continued and for an id that is running."""
        check_request(request, self._max_model_len, self._vocab_size)
        if request.id in self._scripts:
            raise ValueError(f"request {request.id!r} is running already; give each one an id of its own")
        self._scripts[request.id] = self._script(request)

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids do not matter."""
        self._scripts.pop(request_id, None)

    def step(self) -> list[Generation]:
        """Give one token to each request that runs; returns those that finished."""
        self._check_usable()
        if self._step_s:
            time.sleep(self._step_s)
        finished = []
        for script in list(self._scripts.values())[: self._max_running]:
            self._give(script)
            if script.num_given == len(script.tokens):
                del self._scripts[script.request.id]
                finished.append(_generation(script))
        return finished

    def load(self, folder: Path, version: Version) -> None:
        """Take over a version. Raises EngineError when there is no such folder; the engine is then unusable."""
        self._check_usable()
        if not folder.is_dir():
            self._usable = False
            raise EngineError(f"weights {version} could not be loaded: there is no folder {folder}")
        self._version = version
        for script in self._scripts.values():
            script.old_kv = script.num_given > 0

    def close(self) -> None:
        """Forget everything."""
        self._usable = False
        self._scripts.clear()

    def _check_usable(self) -> None:
        if not self._usable:
            raise EngineError("this engine failed or was closed earlier and must not be used: restart this worker")

    def _script(self, request: GenerationRequest) -> _Script:
        limit = min(request.sampling.max_tokens, self._max_model_len - len(request.prompt))
        if self._answer is None:
            drawn: Sequence[int] = [derive_seed(request.seed, index) % self._vocab_size for index in range(limit)]
            logprob = -math.log(self._vocab_size)
        else:
            drawn, logprob = list(self._answer(request)), 0.0
        ends = [index + 1 for index, token in enumerate(drawn) if token in self._stop_ids]
        length = min([*ends, len(drawn), limit])
        finish = Finish.STOP if ends and ends[0] == length else Finish.LENGTH
        return _Script(request, drawn[:length], logprob, finish)

    def _give(self, script: _Script) -> None:
        script.num_given += 1
        if script.runs and script.runs[-1][:2] == self._version:
            script.runs[-1] = script.runs[-1]._replace(count=script.runs[-1].count + 1)
        else:
            script.runs.append(VersionRun(*self._version, 1))


def _generation(script: _Script) -> Generation:
    return Generation(
        id=script.request.id,
        tokens=tuple(script.tokens),
        logprobs=(script.logprob,) * len(script.tokens),
        versions=tuple(script.runs),
        finish=script.finish,
        old_kv=script.old_kv,
    )
