"""Tiny models in a temporary folder, made once per test run, and what transformers says about their log-probs.

Two seeds of one kind have the same tensors and very different weights, as two versions of a policy have.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from trainers.new_model import create

ALPHABET = "0123456789=> ,abcdefghij"
POSITIONS = 256


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="offsetrl-models-")


def model_folder(seed: int = 0, *, tie: bool = True, layers: int = 2) -> Path:
    """Folder of a model with random weights, over ALPHABET."""
    return _made(seed, tie, layers)


@functools.cache
def _made(seed: int, tie: bool, layers: int) -> Path:
    folder = Path(_root().name) / f"{'tied' if tie else 'untied'}-{layers}-{seed}"
    create(folder, alphabet=ALPHABET, layers=layers, hidden=64, heads=2, max_positions=POSITIONS, tie=tie, seed=seed)
    return folder


@functools.cache
def reference(folder: Path) -> Any:
    """The model of a folder as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def all_logprobs(folder: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [S, V] at the place of each token, by one clean forward pass."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.no_grad():
        logits: torch.Tensor = reference(folder)(input_ids=ids).logits[0, len(prompt) - 1 :]
    return (logits / temperature).log_softmax(-1)


def token_logprobs(folder: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each token after the prompt and the tokens before it."""
    return _chosen(all_logprobs(folder, prompt, tokens, temperature), tokens)


def logprobs_over_a_swap(
    old: Path, new: Path, prompt: Sequence[int], tokens: Sequence[int], num_old: int
) -> list[float]:
    """Log-probs when the first `num_old` tokens come from old weights, and the rest from new ones over old keys."""
    cache = DynamicCache()
    with torch.no_grad():
        before = torch.tensor([[*prompt, *tokens[: num_old - 1]]])
        first = reference(old)(input_ids=before, past_key_values=cache, use_cache=True).logits[0, len(prompt) - 1 :]
        after = torch.tensor([list(tokens[num_old - 1 : -1])])
        second = reference(new)(input_ids=after, past_key_values=cache, use_cache=True).logits[0]
    return _chosen(torch.cat([first, second]).log_softmax(-1), tokens)


def _chosen(logprobs_SV: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    chosen: list[float] = logprobs_SV.gather(-1, torch.tensor(list(tokens))[:, None]).squeeze(-1).tolist()
    return chosen
