"""Bench `trainer`: a step of the trainer against a bare torch loop over the same padded batches.

Both sides have a copy of one model and do what a step needs: log-probs of the sampled tokens, the clipped loss with its
off-policy weight, backward, clipping, AdamW. The bare loop gets its batches padded and on the device, and keeps no
figures; ours gets rows, pads them, counts the whole step's tokens, and reports its metrics. One call = one step.

Shapes: B = rows, T = positions, K = positions that outputs are needed for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Side, ratio
from support.models import ALPHABET
from support.training import make_row, make_stepper
from trainers.batching import MicroBatch, Row, micro_batches
from trainers.model import load_policy
from trainers.new_model import create

TARGET = 0.9
RATE, BETAS = 1e-5, (0.9, 0.99)


def run(bench: Bench, *, hidden: int = 256, layers: int = 4, num_rows: int = 8, num_tokens: int = 192) -> None:
    """Measure a step of `num_rows` rows of up to `num_tokens` tokens, in two micro-batches."""
    micro_batch_tokens = num_rows * num_tokens // 2
    with tempfile.TemporaryDirectory(prefix="offsetrl-bench-") as place:
        folder = Path(place) / "model"
        create(folder, alphabet=ALPHABET, layers=layers, hidden=hidden, heads=4, max_positions=num_tokens)
        rows = make_rows(num_rows, num_tokens)
        stepper = make_stepper(folder, learning_rate=RATE, betas=BETAS, micro_batch_tokens=micro_batch_tokens)
        bare = Bare(folder, micro_batches(rows, micro_batch_tokens))
        times = bench.measure(
            f"step, {num_rows} rows of {num_tokens // 2} to {num_tokens} tokens",
            [
                Side("trainer", lambda: stepper.execute(rows, step=0, seed=0)),
                Side("bare torch loop", bare.step),
                Side("forward and backward only", bare.forward_and_backward),
            ],
        )
    bench.check("bare", ratio(times["bare torch loop"], times["trainer"], "wall"), TARGET)
    alone = times["forward and backward only"].median_us("wall")
    bench.note(f"forward and backward are {alone / times['trainer'].median_us('wall'):.0%} of the trainer's step")
    bench.hold_against("forward and backward alone", alone / 1e3, "ms a step")


def make_rows(count: int, num_tokens: int) -> list[Row]:
    """Rows with a quarter of prompt, lengths between half of `num_tokens` and all of it."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        length = num_tokens - (num_tokens // 2) * i // count
        tokens = torch.randint(2, len(ALPHABET), (length,), generator=random).tolist()
        prompt = length // 4
        rows.append(make_row(tokens, [int(t >= prompt) for t in range(length)], advantage=(-1.0) ** i, behaviour=-3.0))
    return rows


class Bare:
    """What one would write for a single model on a single machine."""

    def __init__(self, folder: Path, batches: list[MicroBatch]) -> None:
        self.model: Any = load_policy(folder)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
        self._batches = [_Tensors(batch) for batch in batches]
        self._num_tokens = sum(batch.num_trainable for batch in batches)

    def step(self) -> None:
        self.forward_and_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def forward_and_backward(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for batch in self._batches:
            self._loss(batch).backward()  # type: ignore[no-untyped-call]  # torch's is not annotated

    def _loss(self, batch: _Tensors) -> Tensor:
        width = batch.tokens_BT.shape[1]
        output = self.model(input_ids=batch.tokens_BT[:, :-1], use_cache=False, logits_to_keep=width - batch.first)
        logits_BKV = output.logits.float()
        l_BK = logits_BKV.gather(-1, batch.tokens_BT[:, batch.first :, None]).squeeze(-1) - logits_BKV.logsumexp(-1)
        ratio_BK = (l_BK - l_BK.detach()).exp()
        weight_BK = (l_BK.detach() - batch.behaviour_BK).exp().clamp(max=2.0)
        x_BK = -torch.minimum(ratio_BK * batch.advantages_BK, ratio_BK.clamp(0.8, 1.28) * batch.advantages_BK)
        loss: Tensor = (weight_BK * x_BK)[batch.mask_BK].sum() / self._num_tokens
        return loss


class _Tensors:
    """A micro-batch as tensors; K = T - first."""

    def __init__(self, batch: MicroBatch) -> None:
        self.first = batch.first
        self.tokens_BT = torch.from_numpy(batch.tokens_BT)
        self.mask_BK, self.behaviour_BK, self.advantages_BK = (
            torch.from_numpy(array)[:, batch.first :]
            for array in (batch.mask_BT, batch.behaviour_BT, batch.advantages_BT)
        )
