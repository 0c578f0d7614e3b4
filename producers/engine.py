"""What an inference engine is: requests in, finished generations out, advanced one step at a time by its owner.

`producers.engines` names the implementations (vLLM, transformers, scripted); all pass `tests/contract/test_engine.py`.
The owner calls `step` in a loop; weights are swapped between two steps, so running requests go on over the swap and
their tokens carry both versions.
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
    """A finished continuation: S tokens, their log-probs under the distribution sampled from, and who made them."""

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
        """Forget a request; unknown ids do not matter."""
        ...

    def step(self) -> list[Generation]:
        """Advance all running requests by about one token; returns those that finished. Raises EngineError."""
        ...

    def load(self, folder: Path, version: Version) -> None:
        """Swap in verified weights from a folder in Hugging Face layout; running requests go on. Raises EngineError,
        after which the engine must not be used."""
        ...

    def close(self) -> None:
        """Let go of memory and child processes."""
        ...
