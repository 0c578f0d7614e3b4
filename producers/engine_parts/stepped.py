"""What engines with a step loop do alike: who waits and who runs, when weights are swapped, and that a failure is final.

An engine builds on it with six short methods: begin, advance, forget, so far, load, and let go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from producers.engine import Generation, GenerationRequest
from producers.engine_parts.answer import Answer
from producers.engine_parts.swap import Swap, SwapQueue
from producers.engines import check_request
from schemas.errors import EngineError
from schemas.records import Finish, Version


class SteppedEngine(ABC):
    """The part of `producers.engine.Engine` that needs no model."""

    def __init__(self, version: Version, *, max_model_len: int, max_running: int, vocab_size: int, swap: Swap) -> None:
        self._version = version
        self._max_model_len, self._max_running, self._vocab_size = max_model_len, max_running, vocab_size
        self._swaps = SwapQueue(swap)
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: set[str] = set()
        self._old_kv: set[str] = set()
        """Running requests that were given tokens over keys and values of older weights, or are about to be."""
        self._usable = True

    @abstractmethod
    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Take on requests that the next step advances."""

    @abstractmethod
    def _advance(self) -> list[Generation]:
        """One step of all that runs; returns, and forgets, those that finished."""

    @abstractmethod
    def _forget(self, request_id: str) -> None:
        """Drop a request that runs."""

    @abstractmethod
    def _so_far(self, request_id: str) -> Generation:
        """What a request that runs has been given."""

    @abstractmethod
    def _load(self, folder: Path, version: Version) -> None:
        """Load weights, and in the mode `recompute` forget the keys and values of the older ones."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give back memory and processes."""

    @property
    def version(self) -> Version:
        """The weights that the next step samples from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError for a prompt that cannot be continued and for an id that is running."""
        check_request(request, self._max_model_len, self._vocab_size)
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request {request.id!r} is running already; give each one an id of its own")
        self._waiting[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids do not matter. Raises EngineError when weights waited for it and do not load."""
        self._waiting.pop(request_id, None)
        if request_id in self._running:
            self._leave(request_id)
            self._forget(request_id)
            self._swap_when_due()

    def progress(self, request_id: str) -> Generation | None:
        """What a request that runs or waits has been given so far, with the finish `abort`; None for other ids."""
        if request_id in self._running:
            return self._so_far(request_id)
        return Answer().generation(request_id, Finish.ABORT) if request_id in self._waiting else None

    def step(self) -> list[Generation]:
        """Advance all running requests by about one token; returns those that finished. Raises EngineError."""
        self._check_usable()
        try:
            self._admit()
            finished = self._advance() if self._running else []
        except Exception as error:
            self._usable = False
            raise EngineError(f"the engine failed in a step: {error!r}; restart this worker") from error
        for generation in finished:
            self._leave(generation.id)
        self._swap_when_due()
        return finished

    def load(self, folder: Path, version: Version) -> None:
        """Swap in the weights of a folder, or, in the mode `finish`, once nothing runs on the older ones.

        Raises EngineError, after which the engine must not be used.
        """
        self._check_usable()
        self._swaps.offer(folder, version)
        self._swap_when_due()

    def close(self) -> None:
        """Let go of memory and child processes."""
        self._usable = False
        self._waiting, self._running = {}, set()
        self._let_go()

    def _check_usable(self) -> None:
        if not self._usable:
            raise EngineError("this engine failed or was closed earlier and must not be used: restart this worker")

    def _limit(self, request: GenerationRequest) -> int:
        """Most tokens that a request can be given."""
        return min(request.sampling.max_tokens, self._max_model_len - len(request.prompt))

    def _leave(self, request_id: str) -> None:
        self._running.discard(request_id)
        self._old_kv.discard(request_id)

    def _admit(self) -> None:
        """Begin waiting requests only when they can run, so that they begin on the newest weights."""
        room = 0 if self._swaps.holds_back else self._max_running - len(self._running)
        requests = [self._waiting.pop(request_id) for request_id in list(self._waiting)[:room]]
        if requests:
            self._running |= {request.id for request in requests}
            self._begin(requests)

    def _swap_when_due(self) -> None:
        if (due := self._swaps.due(len(self._running))) is None:
            return
        folder, version = due
        self._usable = False  # half a load cannot be undone
        try:
            self._load(folder, version)
        except Exception as error:
            raise EngineError(
                f"weights {version} in {folder} could not be loaded: {error!r}; what is in the engine now is neither "
                "these nor the older ones: restart this worker"
            ) from error
        self._usable = True
        self._version = version
        if self._swaps.mode is Swap.KEEP:
            self._old_kv |= self._running
