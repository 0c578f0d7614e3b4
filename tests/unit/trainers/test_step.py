"""A step does not depend on how it was cut up, changes nothing when it must not, and repeats bit for bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from support.models import model_folder
from support.training import (
    REDUCTIONS,
    SAME_GRADIENT,
    gradient_error,
    gradients_of,
    make_row,
    make_stepper,
    random_rows,
    stepper_of_case,
)
from trainers.batching import pad
from trainers.model import checkpoint_gradients, load_policy, token_logprobs, weights_digest
from trainers.reductions import REDUCTIONS as OF_TRAINER
from trainers.step import Stepper

pytestmark = pytest.mark.model


def digest(stepper: Stepper) -> str:
    return weights_digest(stepper.model)


def gradients(**how: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of one step over twelve rows, and its figures."""
    stepper = stepper_of_case(how)
    metrics = stepper.execute(random_rows(12), step=0, seed=0).as_dict()
    return gradients_of(stepper), metrics


def test_no_reduction_is_left_out() -> None:
    assert REDUCTIONS.keys() == OF_TRAINER.keys()


@pytest.mark.parametrize("loss", ["ppo-clip", "reinforce"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_change_neither_loss_nor_gradient(loss: str, reduction: str) -> None:
    given: dict[str, Any] = {"loss": loss, "reduction": reduction, "settings": REDUCTIONS[reduction]}
    whole, of_whole = gradients(micro_batch_tokens=10_000, **given)
    for budget in (60, 1):
        cut, of_cut = gradients(micro_batch_tokens=budget, **given)
        assert gradient_error(cut, whole) <= SAME_GRADIENT
        assert of_cut == pytest.approx(of_whole, rel=1e-3, abs=1e-5)


def test_the_gradient_is_that_of_the_formula() -> None:
    """Autograd over the formula, written out over single rows, against what the step gave to Adam."""
    rows = random_rows(12)
    model = load_policy(model_folder())
    num_tokens = sum(row.num_trainable for row in rows)
    total = torch.zeros(())
    for row in rows:
        logprobs_T = token_logprobs(model, pad([row]))[0]
        for t in range(len(row.tokens_T)):
            if row.mask_T[t]:
                weight = min(math.exp(logprobs_T[t].item() - float(row.behaviour_T[t])), 2.0)
                total = total - weight * row.advantage * logprobs_T[t] / num_tokens
    expected = torch.autograd.grad(total, [p for p in model.parameters()])
    found, _ = gradients()
    assert gradient_error(found, dict(zip(found, expected, strict=True))) <= SAME_GRADIENT


def test_rows_without_anything_trainable_change_nothing() -> None:
    rows = random_rows(6)
    without, with_them = make_stepper(micro_batch_tokens=40), make_stepper(micro_batch_tokens=40)
    without.execute(rows, step=0, seed=0)
    with_them.execute([*rows, *[make_row([3, 4, 5], [0, 0, 0])] * 20], step=0, seed=0)
    assert digest(without) == digest(with_them)


def test_nothing_trainable_at_all_skips_the_update() -> None:
    stepper = make_stepper()
    before = digest(stepper)
    metrics = stepper.execute([make_row([3, 4], [0, 0])], step=0, seed=0)
    assert (metrics.updates_skipped, metrics.loss, digest(stepper)) == (1, 0.0, before)


@pytest.mark.parametrize("poison", [math.nan, -100.0, math.inf])
def test_a_masked_tokens_log_prob_reaches_neither_figures_nor_weights(poison: float) -> None:
    rows = random_rows(4)
    poisoned = random_rows(4)
    for row in poisoned:
        row.behaviour_T[~row.mask_T] = poison
    clean, other = make_stepper(), make_stepper()
    assert clean.execute(rows, step=0, seed=0) == other.execute(poisoned, step=0, seed=0)
    assert digest(clean) == digest(other)


def test_a_behaviour_log_prob_far_off_is_bounded() -> None:
    stepper = make_stepper()
    metrics = stepper.execute([make_row([3, 4, 5], [0, 1, 1], behaviour=-100.0)], step=0, seed=0).as_dict()
    assert metrics["truncated"] == 1 and metrics["lag_max"] == 20
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted() -> None:
    stepper = make_stepper()
    before = digest(stepper)
    metrics = stepper.execute([make_row([3, 4, 5], [0, 1, 1], advantage=math.inf)], step=0, seed=0)
    assert metrics.updates_skipped == 1
    assert digest(stepper) == before
    assert stepper.execute(random_rows(4), step=1, seed=0).updates_skipped == 0
    assert digest(stepper) != before


def test_learning_rate_zero_changes_not_one_bit() -> None:
    stepper = make_stepper(learning_rate=0.0, weight_decay=1.0)
    with torch.no_grad():
        next(stepper.model.parameters()).view(-1)[:8] = -0.0
    before = digest(stepper)
    stepper.execute(random_rows(8), step=0, seed=0)
    assert digest(stepper) == before


def test_one_update_takes_its_own_log_probs_as_proximal() -> None:
    metrics = make_stepper().execute(random_rows(8), step=0, seed=0).as_dict()
    assert metrics["ratio"] == 1.0 and metrics["clipped_high"] == metrics["clipped_low"] == 0


def test_several_updates_share_one_proximal_and_use_each_row_once() -> None:
    rows = random_rows(12)
    metrics = make_stepper(updates_per_step=3, learning_rate=1e-2).execute(rows, step=0, seed=0).as_dict()
    assert metrics["updates"] == 3
    assert metrics["tokens"] == sum(row.num_trainable for row in rows)
    assert metrics["ratio"] != 1.0  # the later updates move away from the weights that the step began with


def test_the_seed_deals_the_rows_and_the_same_seed_repeats_the_step() -> None:
    digests = []
    for seed in (5, 5, 6):
        stepper = make_stepper(updates_per_step=3)
        stepper.execute(random_rows(12), step=0, seed=seed)
        digests.append(digest(stepper))
    assert digests[0] == digests[1] != digests[2]


def test_epochs_train_on_each_part_again_against_the_same_proximal() -> None:
    rows = random_rows(12)
    once, twice = make_stepper(updates_per_step=3), make_stepper(updates_per_step=3, epochs=2)
    once.execute(rows, step=0, seed=0)
    metrics = twice.execute(rows, step=0, seed=0).as_dict()
    assert metrics["updates"] == 6
    assert metrics["tokens"] == 2 * sum(row.num_trainable for row in rows)
    assert digest(once) != digest(twice)
    alone = make_stepper(epochs=2).execute(rows, step=0, seed=0).as_dict()
    assert alone["updates"] == 2 and alone["ratio"] != 1.0


def test_gradient_checkpointing_changes_not_one_bit_and_runs_layers_again() -> None:
    plain, saving = make_stepper(), make_stepper()
    attentions: list[Any] = [module for module in saving.model.modules() if hasattr(module, "attention_dropout")]
    assert attentions
    for module in attentions:
        module.attention_dropout = 0.5
    saving.model.add_module("unused_dropout", torch.nn.Dropout(0.5))
    checkpoint_gradients(saving.model)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    norm = next(module for name, module in saving.model.named_modules() if name.endswith("input_layernorm"))
    norm.register_forward_pre_hook(count)
    assert plain.execute(random_rows(6), step=0, seed=0) == saving.execute(random_rows(6), step=0, seed=0)
    assert digest(plain) == digest(saving)
    assert calls >= 2, "no layer ran twice"
    assert saving.model.get_submodule("unused_dropout").p == 0.0


def test_a_step_left_between_micro_batches_leaves_whole_weights_or_says_that_they_are_not() -> None:
    class Left(Exception):
        pass

    def leave_at(stepper: Stepper, number: int) -> None:
        count = itertools.count()

        def between() -> None:
            if next(count) == number:
                raise Left

        with pytest.raises(Left):
            stepper.execute(random_rows(12), step=0, seed=0, between=between)

    stepper = make_stepper(micro_batch_tokens=60)
    before = digest(stepper)
    leave_at(stepper, 2)
    assert stepper.clean and digest(stepper) == before
    several = make_stepper(micro_batch_tokens=10_000, updates_per_step=2)
    leave_at(several, 3)  # two passes for the proximal, then the second update
    assert not several.clean and digest(several) != before


def test_a_step_pushes_good_tokens_up_and_bad_ones_down() -> None:
    rows = [make_row([3, 4, 5, 6], [0, 0, 1, 1], advantage=1.0), make_row([3, 4, 9, 9], [0, 0, 1, 1], advantage=-1.0)]
    stepper = make_stepper(correction="none")
    before = token_logprobs(stepper.model, pad(rows)).detach().sum(dim=1)
    for step in range(5):
        stepper.execute(rows, step=step, seed=0)
    after = token_logprobs(stepper.model, pad(rows)).detach().sum(dim=1)
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_figures_of_a_known_step() -> None:
    """One token at log-prob l, sampled at l + ln 2: w = 1/2."""
    folder = model_folder()
    row = make_row([3, 4, 5], [0, 1, 0])
    logprob = token_logprobs(load_policy(folder), pad([row]))[0, 1].item()
    row.behaviour_T[1] = logprob + math.log(2)
    found = make_stepper(folder).execute([row], step=0, seed=0).as_dict()
    assert found["lag_mean"] == pytest.approx(math.log(2), rel=1e-4)
    assert found["lag_kl"] == pytest.approx(0.5 - 1 + math.log(2), rel=1e-3)
    assert found["ess"] == pytest.approx(1.0)
    assert found["entropy"] == pytest.approx(-logprob, rel=1e-5)
    assert found["loss"] == pytest.approx(-0.5, rel=1e-4)
    assert (found["tokens"], found["tokens_total"], found["rows"], found["reward_mean"]) == (1, 3, 1, 0.5)
