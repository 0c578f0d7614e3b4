"""Asks verl 0.9.1 and TRL 1.16.0 for losses, gradients, weights and whitened advantages, and freezes their answers.

They are `fixtures/losses.json` of the trainers' unit tests. The environment is that of make_advantages.py, and:

    oracle/bin/pip install datasets jinja2
    oracle/bin/pip install --no-deps trl==1.16.0
    oracle/bin/python tests/oracle/make_losses.py

Everything is asked for in float64. TRL's loss is a method of its trainer; it is called on a stand-in that has the
attributes it reads, and gives back our log-probs where it would run a model.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "unit" / "trainers" / "fixtures" / "losses.json"
ROWS, WIDTH, HORIZON = 8, 7, 5
LOW, HIGH, CAP = 0.2, 0.28, 1.5
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def make() -> dict[str, Any]:
    """Everything that is frozen."""
    version = importlib.import_module("importlib.metadata").version
    return {
        "by": "tests/oracle/make_losses.py",
        "verl": version("verl"),
        "trl": version("trl"),
        "batches": [_answers(_batch(random.Random(seed), even=even)) for seed, even in enumerate((True, False, True))],
    }


def _batch(rng: random.Random, *, even: bool) -> dict[str, Any]:
    """Rows with holes in their masks, every one with a trainable token; `even`: a row's advantages are all equal."""

    def table(draw: Callable[[], float]) -> list[list[float]]:
        return [[round(draw(), 6) for _ in range(WIDTH)] for _ in range(ROWS)]

    proximal = table(lambda: -rng.choice((0.02, 0.2, 2.0)) * rng.uniform(0.1, 1.5))
    shifted = [
        [[min(value + rng.gauss(0, scale), -1e-4) for value in row] for row in proximal] for scale in (0.4, 0.3, 0.5)
    ]
    logprobs, behaviour, reference = ([[round(v, 6) for v in row] for row in rows] for rows in shifted)
    advantages = table(lambda: rng.gauss(0, 1))
    if even:
        advantages = [[row[0]] * WIDTH for row in advantages]
    mask = [[float(rng.random() < 0.7) for _ in range(WIDTH)] for _ in range(ROWS)]
    for row in mask:
        row[rng.randrange(WIDTH)] = 1.0
    groups = [name for name, size in (("a", 2), ("b", 3), ("c", 3)) for _ in range(size)]
    rng.shuffle(groups)
    return {
        "even": even, "logprobs": logprobs, "proximal": proximal, "behaviour": behaviour, "reference": reference,
        "advantages": advantages, "mask": mask, "groups": groups, "rewards": table(lambda: rng.gauss(0, 1)),
        "values": table(lambda: rng.gauss(0, 1)), "old_values": table(lambda: rng.gauss(0, 0.5)),
        "returns": table(lambda: rng.gauss(0, 1)), "logits": [[rng.gauss(0, 3) for _ in range(5)] for _ in range(4)],
    }  # fmt: skip


def _answers(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    tensors = {
        name: torch.tensor(values, dtype=torch.float64)
        for name, values in batch.items()
        if name not in ("even", "groups")
    }
    return {
        **batch,
        "losses": {**_verl_losses(tensors), **_trl_losses(tensors, even=batch["even"])},
        "kl": _kl(tensors),
        "weights": _weights(tensors),
        "steps": _steps(tensors, batch["groups"]),
    }


def _graded(of: Callable[[Any], Any], at: Any) -> dict[str, Any]:
    """The value of a function of log-probs (or values), and its gradient."""
    import torch

    leaf = at.clone().requires_grad_()
    value = of(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"value": value.item(), "gradient": gradient.tolist()}


def _verl_losses(b: dict[str, Any]) -> dict[str, Any]:
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    actor = importlib.import_module("verl.workers.config").ActorConfig

    def ask(name: str, old: str = "proximal", reduction: str = "token-mean", **settings: Any) -> dict[str, Any]:
        settings = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": CAP, **settings}
        config = actor(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
        loss = getattr(core, f"compute_policy_loss_{name}")
        given = {"response_mask": b["mask"], "loss_agg_mode": reduction, "config": config}
        return _graded(lambda own: loss(b[old], own, b["advantages"], **given)[0], b["logprobs"])

    def value(v: Any) -> Any:
        return core.compute_value_loss(v, b["returns"], b["old_values"], b["mask"], 0.2)[0]

    row_mean = {"reduction": "seq-mean-token-mean"}
    return {
        **{f"verl vanilla {r}": ask("vanilla", reduction=r, clip_ratio_c=1e9) for r in REDUCTIONS[:3]},
        "verl vanilla dual": ask("vanilla"),
        "verl gspo": ask("gspo", **row_mean, clip_ratio_low=0.05, clip_ratio_high=0.1),
        "verl cispo": ask("cispo"),
        "verl sapo": ask("sapo", **row_mean),
        "verl dppo_tv": ask("dppo_tv", old="behaviour", clip_ratio_low=0.05, clip_ratio_high=0.1),
        "verl dppo_kl": ask("dppo_kl", old="behaviour", clip_ratio_low=0.01, clip_ratio_high=0.02),
        "verl geo_mean": ask("geo_mean", clip_ratio_low=0.2, clip_ratio_high=0.3),
        "verl value": _graded(value, b["values"]),
        "verl entropy": _graded(
            lambda x: importlib.import_module("verl.utils.torch_functional").entropy_from_logits(x).sum(), b["logits"]
        ),
    }


def _trl_losses(b: dict[str, Any], *, even: bool) -> dict[str, Any]:
    import torch

    trainer = importlib.import_module("trl").GRPOTrainer
    ratio = (b["proximal"] - b["behaviour"]).exp().clamp(max=1.3)

    def ask(kind: str, level: str = "token", high: float = HIGH, beta: float = 0.0, **args: Any) -> dict[str, Any]:
        given = {
            "prompt_ids": torch.zeros(ROWS, 1).long(), "prompt_mask": torch.ones(ROWS, 1).long(),
            "completion_ids": torch.zeros(ROWS, WIDTH).long(), "completion_mask": b["mask"],
            "advantages": b["advantages"], "old_per_token_logps": b["proximal"],
            "sampling_per_token_logps": b["behaviour"], "ref_per_token_logps": b["reference"],
            "importance_sampling_ratio": ratio, "num_items_in_batch": b["mask"].sum(),
        }  # fmt: skip
        options: dict[str, Any] = {
            "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
            "steps_per_generation": 1, "opsm": None, "importance": False, **args,
        }  # fmt: skip
        stand_in = SimpleNamespace(
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=options["opsm"],
            importance_sampling_level=level, beta=beta, loss_type=kind, epsilon_low=LOW, epsilon_high=high,
            use_vllm=options["importance"], vllm_importance_sampling_correction=True, max_completion_length=HORIZON,
            current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)}, args=SimpleNamespace(**options),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            get_off_policy_mask=trainer.get_off_policy_mask, get_gamma_weights=trainer.get_gamma_weights,
        )  # fmt: skip

        def of(logprobs: Any) -> Any:
            stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
            return trainer._compute_loss(stand_in, None, given)

        return _graded(of, b["logprobs"])

    answers = {
        "trl grpo": ask("grpo"),
        "trl dr_grpo": ask("dr_grpo"),
        "trl dapo": ask("dapo"),
        "trl dapo delta": ask("dapo", delta=CAP),
        "trl dapo importance": ask("dapo", importance=True),
        "trl dapo k3": ask("dapo", beta=0.1),
        "trl dapo k3 corrected": ask("dapo", beta=0.1, use_bias_correction_kl=True),
        "trl cispo": ask("cispo", high=1.3),
        "trl sapo": ask("sapo"),
    }
    if even:  # TRL knows rows of one advantage only, where a row counts as one
        answers |= {"trl gspo": ask("grpo", level="sequence", high=0.05), "trl grpo opsm": ask("grpo", opsm=0.02)}
    return answers


def _kl(b: dict[str, Any]) -> dict[str, Any]:
    core = importlib.import_module("verl.trainer.ppo.core_algos")

    def ask(name: str) -> dict[str, Any]:
        return _graded(lambda own: (core.kl_penalty(own, b["reference"], name) * b["mask"]).sum(), b["logprobs"])

    return {name: ask(name) for name in ("k1", "k2", "k3", "k3+")}


def _weights(b: dict[str, Any]) -> dict[str, Any]:
    """Importance weights, 0 where the mask is; and which tokens survive a rejection."""
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    log_ratio = b["proximal"] - b["behaviour"]

    def weigh(level: str, bound: float | str, normalise: bool = False) -> Any:
        return helper.compute_rollout_correction_weights(log_ratio, b["mask"], level, bound, normalise)[0].tolist()

    def keep(rule: str, bound: str) -> Any:
        return helper.compute_rollout_rejection_mask(log_ratio, b["mask"], rule, bound)[0].tolist()

    return {
        "token": weigh("token", 1.3),
        "sequence": weigh("sequence", 1.3),
        "icepop": weigh("token", "0.8_1.3"),
        "token normalised": weigh("token", 1.3, True),
        "sequence normalised": weigh("sequence", 1.3, True),
        "seq_mean_k1": keep("seq_mean_k1", f"{1 / 1.1}_{1 / 0.95}"),  # verl's band is that of 1 / w
        **{f"{level}_{k}": keep(f"{level}_{k}", bound) for k in ("k2", "k3")
           for level, bound in (("token", "0.05"), ("seq_mean", "0.05"), ("seq_max", "0.1"), ("seq_sum", "0.2"))},
    }  # fmt: skip


def _steps(b: dict[str, Any], groups: list[str]) -> dict[str, Any]:
    """What is computed over a whole step."""
    import numpy as np

    core = importlib.import_module("verl.trainer.ppo.core_algos")
    whiten = importlib.import_module("verl.utils.torch_functional").masked_whiten
    mask, rewards = b["mask"], b["rewards"] * b["mask"]
    whitened, gae_returns = core.compute_gae_advantage_return(rewards, b["values"], mask, 0.97, 0.9)
    plus, plus_returns = core.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=0.97)
    )
    baseline, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards.clone(), mask, np.array(groups, dtype=object)
    )
    return {
        "whiten": (whiten(b["advantages"], mask) * mask).tolist(),
        "gae whitened": (whitened * mask).tolist(),
        "gae returns": (gae_returns * mask).tolist(),
        "reinforce++": plus.tolist(),
        "reinforce++ returns": plus_returns.tolist(),
        "reinforce++ baseline": baseline.tolist(),
    }


def text(frozen: dict[str, Any]) -> str:
    """As JSON, a list of plain values on a line of its own."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(frozen, indent=1)) + "\n"


if __name__ == "__main__":
    FIXTURES.parent.mkdir(exist_ok=True)
    FIXTURES.write_text(text(make()), "utf-8")
    sys.stdout.write(f"{FIXTURES} written\n")
