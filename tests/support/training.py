"""Members and rows to train on, and a stepper over a tiny model, for tests of the trainer's algorithms and ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infra.settings import Settings
from infra.train_settings import TrainTable
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import KEPT, Member, Outcome, Role, Segment, Status, VersionRun
from support.loop import make_settings
from support.models import ALPHABET, model_folder
from support.outcomes import make_outcome
from support.points import model_settings
from trainers.acceleration import Accelerator
from trainers.batching import Row
from trainers.components import Terms, make_algorithms
from trainers.crew import pinned_policy, trained_policy
from trainers.lora import WithoutAdapter, add_adapter
from trainers.model import Policy, make_deterministic
from trainers.normalise import NormaliserInputs, NormaliserOutputs
from trainers.schedule import Optimisation
from trainers.step import Stepper


def make_member(
    tokens: Sequence[int], mask: Sequence[int], *, logprobs: Sequence[float] | None = None, **changes: Any
) -> Member:
    """A kept member; where `mask` is 1 tokens were sampled, before that they are the prompt, between them a tool's."""
    roles = [Role.SAMPLED if bit else (Role.TOOL if 1 in mask[:i] else Role.PROMPT) for i, bit in enumerate(mask)]
    num_sampled = sum(mask)
    fields: dict[str, Any] = dict(
        index=0, attempt=0, offset=0, status=Status.OK, disposition=KEPT, reward=0.5, advantage=1.0,
        num_tokens=len(tokens), num_sampled=num_sampled, temperature=1.0, versions=(VersionRun(1, 0, num_sampled),),
        segments=tuple(Segment(role, 1) for role in roles), tokens=pack_ints(tokens), loss_mask=pack_bits([bool(bit) for bit in mask]),
        logprobs=pack_floats([-1.0] * num_sampled if logprobs is None else logprobs),
    )  # fmt: skip
    return Member(**fields | changes)


def make_row(tokens: Sequence[int], mask: Sequence[int], *, behaviour: float = -1.0, **changes: Any) -> Row:
    """A row whose trainable tokens all have one behaviour log-prob."""
    mask_T = np.array(mask, dtype=np.bool_)
    fields: dict[str, Any] = dict(
        tokens_T=np.array(tokens, dtype=np.int32), mask_T=mask_T, advantage=1.0, temperature=1.0, reward=0.5,
        behaviour_T=np.where(mask_T, np.float32(behaviour), np.float32(0)), num_unusable=0,
    )  # fmt: skip
    return Row(**fields | changes)


def random_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows of 6 to 14 tokens over the tiny models' vocabulary, with a few masked tokens inside their answers."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length, prompt = int(rng.integers(6, 15)), int(rng.integers(1, 5))
        mask = [int(i >= prompt and rng.random() < 0.8) for i in range(length)]
        mask[prompt] = 1
        tokens = rng.integers(2, 2 + len(ALPHABET), length).tolist()
        rows.append(
            make_row(
                tokens, mask, advantage=float(rng.normal()), behaviour=float(rng.uniform(-4, -2)), reward=rng.random()
            )
        )
    return rows


ALGORITHMS = (
    "loss", "correction", "reduction", "settings", "further_corrections", "batch_corrections", "normalisers", "terms",
)  # fmt: skip


def make_stepper(
    folder: Path | None = None,
    *,
    reference: Path | None = None,
    accelerator: Accelerator | None = None,
    lora: bool = False,
    dtype: str = "float32",
    **given: Any,
) -> Stepper:
    """A stepper over a tiny model with random weights, on one thread; `given` is of `make_algorithms` or `Optimisation`."""
    make_deterministic(1)
    algorithms = make_algorithms(**{name: value for name, value in given.items() if name in ALGORITHMS})
    how: dict[str, Any] = {"learning_rate": 1e-3} | {n: v for n, v in given.items() if n not in ALGORITHMS}
    table = TrainTable(dtype=dtype, shard=accelerator is not None)
    policy = trained_policy(folder or model_folder(), table)
    pinned: Policy | None = None
    if lora:
        policy = _with_adapter(policy)
        pinned = WithoutAdapter(policy)
    elif algorithms.needs_reference:
        pinned = pinned_policy(reference or model_folder(seed=1), table)
    return Stepper(policy, algorithms, Optimisation(**how), accelerator, pinned)


def _with_adapter(policy: Policy) -> Policy:
    """With an adapter that changes what the model says, as one that was trained for a while."""
    adapted = add_adapter(policy, TrainTable(lora_rank=4))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted


# Ranks ---------------------------------------------------------------------------------------------------------------

REDUCTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "token-mean": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"seq-mean-token-sum-norm": {"horizon": 16}},
}
"""Every reduction, with the settings that it needs."""
EVERYTHING: dict[str, Any] = {
    "further_corrections": ["opsm"], "batch_corrections": ["batch-normalised"],
    "normalisers": ["kl-in-reward", "gae", "per-task", "whiten"], "terms": Terms(kl=0.1, entropy=0.01),
    "settings": {"kl-in-reward": {"beta": 0.1}},
}  # fmt: skip
"""Everything that looks at all rows of a step, or at other weights than those being trained."""
CASES: dict[str, dict[str, Any]] = {
    f"{reduction}-{tokens}": {"reduction": reduction, "settings": settings, "micro_batch_tokens": tokens}
    for reduction, settings in REDUCTIONS.items()
    for tokens in (10_000, 60, 1)
} | {
    "everything-10000": {"micro_batch_tokens": 10_000, **EVERYTHING},
    "everything-60": {"micro_batch_tokens": 60, **EVERYTHING},
    "lora-10000": {"micro_batch_tokens": 10_000, "lora": True, "terms": Terms(kl=0.1)},
    "lora-60": {"micro_batch_tokens": 60, "lora": True, "terms": Terms(kl=0.1)},
    "bfloat16-60": {"micro_batch_tokens": 60, "dtype": "bfloat16", **EVERYTHING},
    "two-updates": {"micro_batch_tokens": 60, "updates_per_step": 2},
    "poisoned": {"micro_batch_tokens": 60, "poison": True},
    "nothing-trainable": {"micro_batch_tokens": 60, "masked": True},
}
"""What every number of ranks must agree on. One micro-batch leaves all ranks but the first with nothing."""


SHARDED_CASES = (
    "token-mean-60",
    "seq-mean-token-mean-10000",
    "everything-60",
    "bfloat16-60",
    "two-updates",
    "poisoned",
)


SAME_GRADIENT = 1e-6
"""The promise: micro-batches and ranks change a step's gradient by no more than this, see `gradient_error`."""


def gradients_of(stepper: Stepper) -> dict[str, Tensor]:
    """The gradient of the last update, unclipped: Adam's first moment, where the first beta is 0."""
    state = stepper.tensors()["optimizer"]
    return {name: tensor for name, tensor in state.items() if name.endswith(".exp_avg")}


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative error of a whole gradient: the norm of the difference over the norm of what was expected."""
    assert found.keys() == expected.keys() and len(expected) > 10, (len(found), len(expected))
    pairs = [(found[name].double(), expected[name].double()) for name in expected]
    difference, size = (
        math.sqrt(sum(float(t.square().sum()) for t in ts)) for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    assert math.isfinite(difference) and size > 0, (difference, size)
    return difference / size


def stepper_of_case(case: Mapping[str, Any], accelerator: Accelerator | None = None) -> Stepper:
    """A stepper that keeps the step's gradient: Adam's first moment, where the first beta is 0."""
    how = {name: value for name, value in case.items() if name not in ("poison", "masked")}
    return make_stepper(max_grad_norm=1e9, betas=(0.0, 0.99), accelerator=accelerator, **how)


def rows_of_case(case: Mapping[str, Any]) -> list[Row]:
    """Twelve rows; in "poisoned" the last one's advantage is not finite, in "nothing-trainable" no token counts."""
    rows = random_rows(12)
    if case.get("masked"):
        return [replace(row, mask_T=np.zeros_like(row.mask_T)) for row in rows]
    return [*rows[:-1], replace(rows[-1], advantage=math.inf)] if case.get("poison") else rows


def ranks_settings(folder: Path, *, ranks: int) -> Settings:
    """A run of four steps over `training_outcomes`."""
    table = {
        "batch_groups": 2, "max_staleness": 8, "checkpoint_every": 2, "steps": 4, "learning_rate": 1e-3, "ranks": ranks,
        "micro_batch_tokens": 8, "rank_timeout_s": 60.0,
    }  # fmt: skip
    return model_settings(make_settings(folder, train=table), model_folder(layers=1))


def training_outcomes(partition: int, count: int = 4) -> list[Outcome]:
    """Kept groups of two members with tokens of their own."""
    rng = random.Random(partition)
    found = []
    for n in range(count):
        closing = 3 * n + 2
        members = tuple(_random_member(rng, index, 3 * n + index) for index in range(2))
        record = make_outcome(closing_offset=closing, previous=closing - 3 if n else -1, partition=partition)
        found.append(replace(record, group=f"g{partition}{n}", group_size=2, members=members))
    return found


def _random_member(rng: random.Random, index: int, offset: int) -> Member:
    tokens = [rng.randrange(2, 20) for _ in range(8)]
    advantage = rng.uniform(-1, 1)
    return make_member(tokens, [0, 0, 0, 1, 1, 1, 1, 1], index=index, offset=offset, advantage=advantage)


KEPT_ADVANTAGES: list[Tensor] = []


def keep_advantages(inputs: NormaliserInputs) -> NormaliserOutputs:
    """A normaliser that changes nothing and remembers what it was given."""
    KEPT_ADVANTAGES.append(inputs.advantages_BT)
    return NormaliserOutputs(advantages_BT=inputs.advantages_BT)
