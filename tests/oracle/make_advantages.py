"""Asks verl 0.9.1 for the advantages of a few batches and freezes its answers: `fixtures/advantages.json` of the unit tests.

Needs an environment of its own, never the project's; verl's pins are left aside, since only its arithmetic is called:

    python -m venv oracle
    oracle/bin/pip install torch numpy transformers accelerate ray codetiming orjson omegaconf pytest pytest-timeout
    oracle/bin/pip install --no-deps verl==0.9.1 tensordict pyvers cloudpickle importlib_metadata
    oracle/bin/python tests/oracle/make_advantages.py
    oracle/bin/python -m pytest -m oracle tests/oracle

Everything is asked for in float64, but for GDPO, which computes in float32 inside.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "unit" / "consumers" / "fixtures" / "advantages.json"
WIDTH = 9
COEFFICIENTS = {"accuracy": 1.0, "format": 0.25, "style": 2.0}
SCALES = {"accuracy": 1.0, "format": 0.01, "style": 50.0}


def make() -> dict[str, Any]:
    """Everything that is frozen."""
    return {
        "by": "tests/oracle/make_advantages.py",
        "verl": importlib.import_module("importlib.metadata").version("verl"),
        "batches": [_answers(_batch(random.Random(seed), ordered=seed == 0)) for seed in range(4)],
        "lone": _answers(
            {"groups": ["a"], "rewards": [0.7], "lengths": [3], "parts": {name: [0.7] for name in SCALES}}
        ),
        "overlong": _overlong(limit=20, cushion=8, factor=0.5),
    }


def _batch(rng: random.Random, *, ordered: bool) -> dict[str, Any]:
    """Groups of unequal sizes, one of them without spread, their members interleaved."""
    groups = [name for name, size in zip("abcde", (2, 3, 4, 5, 8), strict=True) for _ in range(size)]
    if not ordered:
        rng.shuffle(groups)
    binary = rng.random() < 0.5
    rewards = [float(rng.random() < 0.4) if binary else round(rng.uniform(0, 3), 3) for _ in groups]
    rewards = [0.5 if group == "c" else reward for group, reward in zip(groups, rewards, strict=True)]
    parts = {name: [round(rng.random() * scale, 4) for _ in groups] for name, scale in SCALES.items()}
    return {"groups": groups, "rewards": rewards, "lengths": [rng.randint(1, 6) for _ in groups], "parts": parts}


def _answers(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with what verl makes of it: one number per member, as its advantage is the same on all its tokens."""
    import numpy as np
    import torch

    core = importlib.import_module("verl.trainer.ppo.core_algos")
    num_members = len(batch["groups"])
    mask = torch.zeros(num_members, WIDTH, dtype=torch.float64)
    scores = torch.zeros(num_members, WIDTH, dtype=torch.float64)
    for i, (length, reward) in enumerate(zip(batch["lengths"], batch["rewards"], strict=True)):
        rng = random.Random(i)
        mask[i, rng.sample(range(WIDTH), length)] = 1.0  # with holes, as tool output leaves them
        scores[i, WIDTH - 1] = reward
    index = np.array(batch["groups"], dtype=object)

    def per_member(advantages: Any) -> list[float]:
        return [float(row[at.bool()][0]) for row, at in zip(advantages, mask, strict=True)]

    def ask(name: str, **settings: Any) -> list[float]:
        found, _ = getattr(core, f"compute_{name}_outcome_advantage")(
            token_level_rewards=scores.clone(), response_mask=mask, index=index, **settings
        )
        return per_member(found)

    batch_tensors = {
        "prompts": torch.zeros(num_members, 1),
        "attention_mask": torch.ones(num_members, 1 + WIDTH).long(),
    }
    gdpo = {"gdpo_reward_keys": list(COEFFICIENTS), "gdpo_reward_weights": list(COEFFICIENTS.values())}
    named = {name: np.array(values) for name, values in batch["parts"].items()}
    answers = {
        "grpo": ask("grpo"),
        "grpo eps 0.5": ask("grpo", epsilon=0.5),
        "grpo vectorized": ask("grpo_vectorized"),
        "grpo without std": ask("grpo", norm_adv_by_std_in_grpo=False),
        "rloo": ask("rloo"),
        "rloo vectorized": ask("rloo_vectorized"),
        "opo": ask("opo"),
    }
    if num_members > 1:  # the whitening of a lone sample has no deviation
        answers["gdpo, whitened over the batch's tokens"] = ask(
            "gdpo", config=gdpo, non_tensor_batch=named, batch=batch_tensors
        )
    return {**batch, "coefficients": COEFFICIENTS, "answers": answers}


def _overlong(*, limit: int, cushion: int, factor: float) -> dict[str, Any]:
    """What DAPO's reward manager makes of a reward of 1 at each length up to the limit."""
    import torch

    manager = importlib.import_module("verl.workers.reward_manager.dapo").DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda ids, **_: "", eos_token="."),
        num_examine=0,
        compute_score=lambda **_: 1.0,
        max_resp_len=limit,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=cushion, penalty_factor=factor, log=False),
    )
    protocol = importlib.import_module("verl").DataProto
    lengths = list(range(1, limit + 1))
    responses = torch.zeros(limit, limit, dtype=torch.int64)
    attention = torch.tensor([[1] + [1] * length + [0] * (limit - length) for length in lengths])
    data = protocol.from_dict(
        tensors={
            "prompts": torch.zeros(limit, 1, dtype=torch.int64),
            "responses": responses,
            "attention_mask": attention,
        },
        non_tensors={
            "data_source": [""] * limit,
            "reward_model": [{"ground_truth": ""}] * limit,
            "extra_info": [{} for _ in lengths],
        },
    )
    rewards = manager(data).sum(dim=-1).tolist()
    return {"limit": limit, "cushion": cushion, "factor": factor, "lengths": lengths, "rewards": rewards}


def text(frozen: dict[str, Any]) -> str:
    """As JSON, a list of plain values on a line of its own."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(frozen, indent=1)) + "\n"


if __name__ == "__main__":
    FIXTURES.write_text(text(make()), "utf-8")
    sys.stdout.write(f"{FIXTURES} written\n")
