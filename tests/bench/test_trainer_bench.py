"""The bench `trainer` compares two steps that are the same step."""

from __future__ import annotations

import pytest
import torch

from bench import trainer
from bench.harness import Bench
from support.models import model_folder
from support.training import make_stepper
from trainers.batching import micro_batches

pytestmark = pytest.mark.model


def test_it_runs_and_says_what_it_is_held_against() -> None:
    bench = Bench("tiny", rounds=5, round_s=0.0001)
    trainer.run(bench, hidden=128, layers=1, num_rows=4, num_tokens=16)
    assert [check.what for check in bench.checks] == ["bare"] and bench.checks[0].value > 0
    assert bench.limit is not None


def test_both_sides_take_the_same_step() -> None:
    rows = trainer.make_rows(6, 24)
    stepper = make_stepper(model_folder(), learning_rate=trainer.RATE, betas=trainer.BETAS, micro_batch_tokens=64)
    bare = trainer.Bare(model_folder(), micro_batches(rows, 64))
    for step in range(3):
        stepper.execute(rows, step=step, seed=step)
        bare.step()
    for ours, theirs in zip(stepper.model.parameters(), bare.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
