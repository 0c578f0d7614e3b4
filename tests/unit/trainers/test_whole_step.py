"""What needs all rows of a step: normalisers, batch corrections, a reference, a value head; however the step is cut up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.train_settings import OWN_RATIO, TrainTable
from schemas.errors import SettingError, WeightsError
from schemas.records import Status
from support.models import model_folder
from support.training import (
    EVERYTHING,
    SAME_GRADIENT,
    gradient_error,
    gradients_of,
    make_member,
    make_stepper,
    random_rows,
    stepper_of_case,
)
from trainers.batch_corrections.m2po import m2po
from trainers.batching import Row, pad, row_of
from trainers.components import Terms, check_fit
from trainers.corrections import CorrectionInputs
from trainers.crew import make_stepper as stepper_of_settings
from trainers.entropy import entropies
from trainers.kl import kl_estimate
from trainers.losses import FITS, log_ratio
from trainers.model import load_policy, token_logprobs, token_outputs, weights_digest
from trainers.normalise import whitened
from trainers.step import Stepper
from trainers.value_head import WithValues, values_with_end

pytestmark = pytest.mark.model

LIMIT = 0.5


def step(rows: list[Row] | None = None, **given: Any) -> tuple[Stepper, dict[str, float]]:
    """A stepper after one step of which it keeps the gradient, and the figures."""
    stepper = stepper_of_case(given)
    return stepper, stepper.execute(rows or random_rows(12), step=0, seed=0).as_dict()


def same(first: Stepper, second: Stepper) -> None:
    assert gradient_error(gradients_of(second), gradients_of(first)) <= SAME_GRADIENT


def differs(first: Stepper, second: Stepper) -> bool:
    return gradient_error(gradients_of(second), gradients_of(first)) > 1e-3


def logprobs(rows: list[Row], folder: Path | None = None) -> torch.Tensor:
    return token_logprobs(load_policy(folder or model_folder()), pad(rows)).detach()


@pytest.mark.parametrize("updates", [1, 2])
def test_micro_batches_do_not_change_what_looks_at_all_rows(updates: int) -> None:
    whole, of_whole = step(micro_batch_tokens=10_000, updates_per_step=updates, **EVERYTHING)
    for budget in (60, 1):
        cut, of_cut = step(micro_batch_tokens=budget, updates_per_step=updates, **EVERYTHING)
        same(whole, cut)
        assert of_cut == pytest.approx(of_whole, rel=1e-3, abs=1e-5)


def test_a_normaliser_s_advantages_are_those_trained_on() -> None:
    """REINFORCE's loss is linear in A, so whitened tokens can be put together from two steps by hand: here from autograd."""
    rows = random_rows(12)
    batch = pad(rows)
    mask = torch.from_numpy(batch.mask_BT)
    advantages = whitened(torch.from_numpy(batch.advantages_BT), mask, eps=1e-8)
    model = load_policy(model_folder())
    loss = -(advantages * token_logprobs(model, batch))[mask].sum() / mask.sum()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    stepper, figures = step(rows, loss="reinforce", correction="none", normalisers=["whiten"], micro_batch_tokens=60)
    found = gradients_of(stepper)
    assert gradient_error(found, dict(zip(found, expected, strict=True))) <= SAME_GRADIENT
    assert figures["advantage_std"] > 0


def test_a_batch_correction_sees_every_row_of_its_update() -> None:
    rows = random_rows(12)
    batch = pad(rows)
    mask = torch.from_numpy(batch.mask_BT)
    weights = log_ratio(logprobs(rows), torch.from_numpy(batch.behaviour_BT), mask)
    expected = m2po(CorrectionInputs(log_weight_BT=weights, mask_BT=mask), limit=LIMIT)
    settings = {"m2po": {"limit": LIMIT}}
    rejected = float(expected.figures_BT["m2po_rejected"][mask].mean())
    assert 0 < rejected < 1
    cut, figures = step(rows, correction="none", batch_corrections=["m2po"], settings=settings, micro_batch_tokens=60)
    assert figures["m2po_rejected"] == pytest.approx(rejected)
    kept = [
        replace(row, behaviour_T=row.behaviour_T, mask_T=row.mask_T & expected.weights_BT[i, : len(row.mask_T)].bool().numpy())
        for i, row in enumerate(rows)
    ]  # fmt: skip
    by_hand, _ = step(kept, correction="none", loss="ppo-clip")
    share = sum(row.num_trainable for row in kept) / sum(row.num_trainable for row in rows)
    scaled = {name: gradient * share for name, gradient in gradients_of(by_hand).items()}
    assert gradient_error(gradients_of(cut), scaled) <= SAME_GRADIENT


def test_the_kl_term_is_that_to_the_reference_which_stays() -> None:
    rows = random_rows(12)
    other = model_folder(seed=1)
    stepper, figures = step(rows, terms=Terms(kl=0.5, kl_estimator="k3"), reference=other)
    mask = torch.from_numpy(pad(rows).mask_BT)
    expected = kl_estimate(logprobs(rows), logprobs(rows, other), mask, estimator="k3")[mask].mean()
    assert figures["kl"] == pytest.approx(float(expected), rel=1e-4)
    plain, without = step(rows)
    assert figures["loss"] == pytest.approx(without["loss"] + 0.5 * float(expected), rel=1e-4)
    assert differs(stepper, plain)
    assert stepper._reference is not None
    assert weights_digest(stepper._reference) == weights_digest(load_policy(other))


def test_a_reference_equal_to_the_weights_costs_nothing() -> None:
    with_kl, figures = step(terms=Terms(kl=10.0), reference=model_folder())
    assert figures["kl"] == 0.0
    same(with_kl, step()[0])


def test_the_entropy_bonus_raises_entropy() -> None:
    rows = [replace(row, advantage=0.0) for row in random_rows(12)]
    stepper = make_stepper(terms=Terms(entropy=1.0), learning_rate=1e-2)
    found = [stepper.execute(rows, step=i, seed=0).as_dict()["entropy_exact"] for i in range(4)]
    assert found == sorted(found) and found[-1] > found[0] + 1e-3
    model, batch = load_policy(model_folder()), pad(rows)
    logits = model(input_ids=torch.from_numpy(batch.tokens_BT)).logits[:, :-1].float()
    mask = torch.from_numpy(batch.mask_BT)
    exact = torch.nn.functional.pad(entropies(logits), (1, 0))[mask].mean()
    assert found[0] == pytest.approx(exact.item(), rel=1e-4)


def test_the_value_head_learns_and_is_checkpointed_but_not_published() -> None:
    rows = random_rows(12)
    stepper = make_stepper(normalisers=["gae"], learning_rate=1e-2, micro_batch_tokens=60)
    errors = [stepper.execute(rows, step=i, seed=0).as_dict()["value_error"] for i in range(12)]
    assert errors[-1] < errors[0] / 2
    tensors = {part: {n: t.clone() for n, t in named.items()} for part, named in stepper.tensors().items()}
    assert set(tensors["value"]) == {"weight", "bias"}
    assert stepper.weights().keys() == make_stepper().weights().keys()
    again = make_stepper(normalisers=["gae"], learning_rate=1e-2, micro_batch_tokens=60)
    again.restore(tensors)
    assert stepper.execute(rows, step=12, seed=0) == again.execute(rows, step=12, seed=0)
    assert weights_digest(stepper.model) == weights_digest(again.model)
    with pytest.raises(WeightsError, match="this trainer has none"):
        make_stepper().restore(tensors)


def test_a_state_s_value_is_the_head_s_word_on_the_token_before() -> None:
    """Hidden states of every row alone, by transformers, against both ways in which a step asks for values."""
    policy, rows = load_policy(model_folder()), random_rows(4)
    model = WithValues(policy)
    with torch.no_grad():
        torch.nn.init.normal_(model.value.weight, generator=torch.Generator().manual_seed(1))
    batch = pad(rows)
    found, ends = values_with_end(model, batch)
    trained = token_outputs(model, batch).values_BT
    assert trained is not None
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.tokens_T[None].astype("int64"))
        hidden = policy(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
        expected = model.value(hidden).squeeze(-1)
        for t in row.mask_T.nonzero()[0]:
            torch.testing.assert_close(found[i, t], expected[t - 1], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(trained[i, t], expected[t - 1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ends[i], expected[-1], atol=1e-5, rtol=1e-4)


def test_a_row_that_was_cut_off_is_worth_what_its_last_state_is() -> None:
    """With a head that says 1 everywhere and reward 0, lam 0: only the end's delta tells a cut row from an ended one."""
    rows = [replace(row, reward=0.0) for row in random_rows(2)]
    advantages = []
    for cut_off in (False, True):
        given = [replace(row, cut_off=cut_off) for row in rows]
        stepper = make_stepper(normalisers=["gae", "support.training:keep_advantages"], settings={"gae": {"lam": 0.0}})
        head = stepper._value_head()
        assert head is not None
        with torch.no_grad():
            head.bias.fill_(1.0)  # type: ignore[operator]  # a Linear's bias
        stepper.execute(given, step=0, seed=0)
        from support import training

        advantages.append(training.KEPT_ADVANTAGES[-1])
    ended, cut = advantages
    last = [int(row.mask_T.nonzero()[0][-1]) for row in rows]
    for i, t in enumerate(last):
        assert ended[i, t].item() == pytest.approx(-1.0)
        assert cut[i, t].item() == pytest.approx(0.0)


def test_step_rewards_stand_at_the_end_of_their_turns_and_add_up_to_the_row_s() -> None:
    member = make_member([3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 1, 1], reward=1.0, step_rewards=(0.25, 0.5))
    row = row_of(replace(member, status=Status.TRUNCATED))
    assert row.rewards_T is not None and row.cut_off
    assert row.rewards_T.tolist() == [0, 0, 0.25, 0, 0, 0.75]


def test_uncorrected_staleness_is_refused_unless_it_is_allowed_or_the_loss_corrects() -> None:
    with pytest.raises(ValueError, match="or allow_uncorrected to true"):
        TrainTable(correction="none", max_staleness=2)
    assert TrainTable(correction="none", max_staleness=2, allow_uncorrected=True)
    assert TrainTable(correction="none", max_staleness=2, loss="dppo-tv")
    assert TrainTable(correction="none", max_staleness=2, batch_corrections=["m2po"])
    assert set(OWN_RATIO) == {name for name, fit in FITS.items() if fit.corrects and fit.advantages}


def test_a_loss_that_corrects_by_itself_is_not_corrected_again() -> None:
    with pytest.raises(SettingError, match="would weigh once more"):
        check_fit(loss="dppo-tv", reduction="token-mean", corrections=["none", "opsm"])
    with pytest.raises(SettingError, match="'gspo' is itself only with reduction"):
        stepper_of_settings(TrainTable(loss="gspo"), model_folder())
