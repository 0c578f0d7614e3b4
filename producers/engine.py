"""What an inference engine is: requests in, finished generations out, advanced one step at a time by its owner.

`producers.engines` names the implementations (vLLM, transformers, scripted); all pass `tests/contract/test_engine.py`.
The owner calls `step` in a loop; weights are swapped between two steps, so running requests go on over the swap and
their tokens carry both versions. A request that was cut short is continued, here or elsewhere, by a request whose
prompt ends with the tokens that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from schemas.records import Finish, Sampling, Version, VersionRun


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Token ids to continue."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A continuation: S tokens, their log-probs under the distribution sampled from, and who made them."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    finish: Finish
    old_kv: bool
    """Whether tokens after a swap were sampled over keys and values of older weights."""


class Engine(Protocol):
    """One engine with one set of weights. Belongs to one thread."""

    @property
    def version(self) -> Version:
        """The weights that the next step samples from."""
        ...

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError when the prompt leaves no room for a token."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids do not matter. Raises EngineError when weights waited for it and do not load."""
        ...

    def progress(self, request_id: str) -> Generation | None:
        """What a request that runs or waits has been given so far, with the finish `abort`; None for other ids.

        Later answers begin with what earlier ones held. Costs no step: it may be asked for every request each second.
        """
        ...

    def step(self) -> list[Generation]:
        """Advance all running requests by about one token; returns those that finished. Raises EngineError.

        Weights that waited for the last running request are loaded before it returns."""
        ...

    def load(self, folder: Path, version: Version) -> None:
        """Swap in verified weights from a folder in Hugging Face layout; what running requests do is the engine's
        setting `swap` (`producers.engine_parts.swap`). Raises EngineError, after which the engine must not be used.

        With `keep` and `recompute` the weights are in use on return. With `finish` they may have to wait for running
        requests: `version` tells. Until then the folder must stay, unless newer weights are offered meanwhile."""
        ...

    def close(self) -> None:
        """Let go of memory and child processes."""
        ...
