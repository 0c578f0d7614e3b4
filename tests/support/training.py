"""Members and rows to train on, and a stepper over a tiny model, for tests of the trainer's algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import KEPT, Member, Role, Segment, Status, VersionRun
from support.models import ALPHABET, model_folder
from trainers.batching import Row
from trainers.components import make_algorithms
from trainers.model import load_policy, make_deterministic
from trainers.step import Optimisation, Stepper


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


def make_stepper(
    folder: Path | None = None, *, loss: str = "ppo-clip", correction: str = "token-truncated",
    reduction: str = "token-mean", settings: dict[str, dict[str, Any]] | None = None, **how: Any,
) -> Stepper:  # fmt: skip
    """A stepper over a tiny model with random weights, on one thread."""
    make_deterministic(1)
    algorithms = make_algorithms(loss=loss, correction=correction, reduction=reduction, settings=settings)
    given: dict[str, Any] = {"learning_rate": 1e-3} | how
    return Stepper(load_policy(folder or model_folder()), algorithms, Optimisation(**given))
