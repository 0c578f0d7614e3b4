"""Synchronous training as one plain loop: no log, no store, no daemons, and nothing of trainers/ or consumers/.

Ask, answer, judge, normalise within the group, one optimiser step; then again. With `max_staleness` 0 the whole system
has to give these digests, bit for bit, with any number of workers and partitions.

Shapes: B = rows, T = positions, K = positions from the first answer on, V = vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from producers.environments.sort_digits import sort_digits
from producers.tokenizer import Tokenizer
from schemas.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What decides the digests."""

    folder: Path
    policy: str
    seed: int
    steps: int
    batch_groups: int
    group_size: int
    digits: int
    max_tokens: int
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float


def digests(plain: Plain) -> list[str]:
    """SHA-256 of the weights after each step."""
    torch.use_deterministic_algorithms(True)
    model = AutoModelForCausalLM.from_pretrained(plain.folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plain.learning_rate, betas=plain.betas, weight_decay=plain.weight_decay, fused=True
    )
    groups = _groups(plain, int(model.config.vocab_size), int(model.config.eos_token_id))
    found = []
    for _ in range(plain.steps):
        rows = [row for _ in range(plain.batch_groups) for row in next(groups)]
        optimizer.zero_grad()
        _loss(model, rows).backward()  # type: ignore[no-untyped-call]  # torch's is not annotated
        torch.nn.utils.clip_grad_norm_(model.parameters(), plain.max_grad_norm)
        optimizer.step()
        found.append(_digest(model))
    return found


def _groups(plain: Plain, vocab_size: int, eos: int) -> Iterator[list[_Row]]:
    """Groups that teach something, in the order of their numbers: those whose answers are all worth the same are left out."""
    environment = sort_digits(plain.seed, digits=plain.digits)
    tokenizer = Tokenizer(plain.folder)
    number = 0
    while True:
        prompts, answers, rewards = [], [], []
        for index in range(plain.group_size):
            seed = derive_seed(plain.seed, plain.policy, f"g{number:08d}", index)
            session = environment.open(number, "", seed)
            answer = _answer(derive_seed(seed, "turn", 1), vocab_size, eos, plain.max_tokens)
            prompts.append(tuple(tokenizer.encode(session.observe().text)))
            session.act(tokenizer.decode(answer), answer[-1] != eos)
            answers.append(answer)
            rewards.append(session.verdict().reward)
        number += 1
        scores = np.array(rewards, dtype=np.float64)
        if scores.max() == scores.min():
            continue
        advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        yield [_Row(*row) for row in zip(prompts, answers, advantages.tolist(), strict=True)]


def _answer(seed: int, vocab_size: int, eos: int, max_tokens: int) -> tuple[int, ...]:
    """What the scripted engine says: uniform tokens up to the end token."""
    drawn = [derive_seed(seed, place) % vocab_size for place in range(max_tokens)]
    return tuple(drawn[: drawn.index(eos) + 1] if eos in drawn else drawn)


def _loss(model: torch.nn.Module, rows: list[_Row]) -> Tensor:
    """-A times the log-prob of each answer's tokens, over the number of all of them (the ratio is 1 in one update)."""
    rows = sorted(rows, key=lambda row: -len(row.prompt + row.answer))
    width = len(rows[0].prompt + rows[0].answer)
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row.prompt + row.answer)] = torch.tensor(row.prompt + row.answer)
        mask_BT[i, len(row.prompt) : len(row.prompt + row.answer)] = True
    advantages_BT = torch.where(
        mask_BT, torch.tensor([row.advantage for row in rows], dtype=torch.float32)[:, None], 0.0
    )
    first = int(mask_BT.any(dim=0).int().argmax())
    logits_BKV = model(input_ids=tokens_BT[:, :-1], use_cache=False, logits_to_keep=width - first).logits.float()
    chosen_BK = logits_BKV.gather(-1, tokens_BT[:, first:, None]).squeeze(-1) - logits_BKV.logsumexp(-1)
    logprobs_BT = torch.nn.functional.pad(chosen_BK, (first, 0))
    ratio_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0).exp()
    total: Tensor = (mask_BT.float() / int(mask_BT.sum()) * torch.where(mask_BT, -ratio_BT * advantages_BT, 0.0)).sum()
    return total


def _digest(model: torch.nn.Module) -> str:
    """Over name, dtype, shape and bytes of every tensor in the order of their names; a tied one under its first name."""
    seen: dict[int, str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        seen.setdefault(tensor.data_ptr(), name)
    found = hashlib.sha256()
    for name in sorted(seen.values()):
        tensor = state[name].detach().contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
