"""`dtype = "bfloat16"`: small updates add up in float32 master weights, what is published is rounded once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.train_settings import TrainTable
from infra.weights.announce import read_heads
from infra.weights.fetch import fetch, load_manifest
from schemas.errors import SettingError, WeightsError
from support.loop import append, make_log, make_settings
from support.models import model_folder
from support.points import Crash, crash_at, ledger_of, model_settings, start_trainer, train
from support.training import (
    gradient_error,
    gradients_of,
    make_row,
    make_stepper,
    random_rows,
    stepper_of_case,
    training_outcomes,
)
from trainers import checkpoint
from trainers.batching import pad
from trainers.components import make_algorithms
from trainers.crew import make_stepper as stepper_of_settings
from trainers.crew import trained_policy
from trainers.model import checkpoint_gradients, load_policy, token_logprobs, weights_bytes, weights_digest
from trainers.precision import rounded
from trainers.schedule import Optimisation
from trainers.step import Stepper

pytestmark = pytest.mark.model

BF16 = "bfloat16"
RATE = 1e-6
STEPS = 4


def moved(stepper: Stepper, steps: int = 24) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before so many steps, and how far each was moved by them."""
    before = {name: tensor.clone() for name, tensor in stepper.weights().items()}
    for step in range(steps):
        assert stepper.execute(random_rows(4, seed=step), step=step, seed=step).updates_skipped == 0
    return before, {name: tensor.double() - before[name].double() for name, tensor in stepper.weights().items()}


def test_updates_too_small_for_bfloat16_add_up_as_they_do_in_float32() -> None:
    before, found = moved(make_stepper(dtype=BF16, learning_rate=RATE))
    _, expected = moved(make_stepper(learning_rate=RATE))
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    sizes = torch.cat([tensor.abs().flatten() for tensor in expected.values()])
    assert 3e-6 < sizes.mean() < sizes.max() < 24e-6, "24 updates of at most 1e-6 each"
    assert gradient_error(found, expected) < 0.06, (
        "of the way moved: measured 0.036, from gradients near 0 whose sign Adam takes"
    )


def test_weights_kept_in_bfloat16_would_stay_where_they_are() -> None:
    """What a pure bfloat16 AdamW does: the reason for master weights. 1e-3 has neighbours 7.6e-6 apart."""
    kept = Stepper(load_policy(model_folder(), dtype=BF16), make_algorithms(), Optimisation(learning_rate=RATE))
    before, differences = moved(kept)
    weights = torch.cat([tensor.flatten().float() for tensor in before.values()])
    steps = torch.cat([tensor.flatten() for tensor in differences.values()])
    large = weights.abs() >= 1e-3
    assert large.double().mean() > 0.9
    assert steps[large].abs().max() == 0.0


def test_the_gradient_points_where_float32_points() -> None:
    gradients = []
    for dtype in ("float32", BF16):
        stepper = stepper_of_case({"dtype": dtype, "micro_batch_tokens": 60})
        stepper.execute(random_rows(12), step=0, seed=0)
        gradients.append(torch.cat([tensor.double().flatten() for tensor in gradients_of(stepper).values()]))
        assert {tensor.dtype for tensor in gradients_of(stepper).values()} == {torch.float32}
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.999


def test_log_probs_come_from_float32_logits_at_the_record_s_temperature() -> None:
    policy = trained_policy(model_folder(), TrainTable(dtype=BF16))
    row = make_row([3, 4, 5, 6, 7], [0, 1, 1, 1, 1], temperature=0.7)
    with torch.no_grad():
        found = token_logprobs(policy, pad([row]))
        logits = policy(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    assert logits.dtype == torch.bfloat16, "as engines compute them"
    temperature = torch.tensor(0.7)
    expected = (logits.float() / temperature).log_softmax(-1)[0].gather(-1, torch.tensor([[4], [5], [6], [7]]))
    assert found.dtype == torch.float32
    assert found[0, 1:].tolist() == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-6)


def test_reference_and_proximal_are_computed_as_the_weights_that_are_trained() -> None:
    """On equal weights all three say the same, to the last bit."""
    table = TrainTable(dtype=BF16, kl_coefficient=0.1, updates_per_step=2, learning_rate=0.0)
    stepper = stepper_of_settings(table, model_folder())
    figures = stepper.execute(random_rows(8), step=0, seed=0).as_dict()
    assert (figures["kl"], figures["ratio"]) == (0.0, 1.0)


def test_gradient_checkpointing_changes_not_one_bit() -> None:
    plain, saving = make_stepper(dtype=BF16), make_stepper(dtype=BF16)
    checkpoint_gradients(saving.model)
    assert plain.execute(random_rows(6), step=0, seed=0) == saving.execute(random_rows(6), step=0, seed=0)
    assert weights_digest(plain.model) == weights_digest(saving.model)


def test_rounding_is_to_nearest_and_leaves_what_a_kind_of_model_keeps() -> None:
    policy = torch.nn.Linear(2, 2)
    policy._keep_in_fp32_modules_strict = {"gate.bias"}  # type: ignore[assignment]  # as classes of transformers have it
    half = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    found = rounded(policy, {"a.weight": half, "layers.0.gate.bias": half, "n": torch.tensor(3)})
    assert found["a.weight"].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7] and found["a.weight"].dtype == torch.bfloat16
    assert found["layers.0.gate.bias"] is half and found["n"].dtype == torch.int64


# A whole run ---------------------------------------------------------------------------------------------------------


class Scene:
    """Four steps' outcomes on a log, a store, and a folder of checkpoints."""

    def __init__(self, folder: Path, **table: Any) -> None:
        given = {"batch_groups": 2, "max_staleness": 8, "checkpoint_every": 2, "steps": STEPS, "learning_rate": 1e-4}
        settings: Settings = make_settings(folder, train={**given, "dtype": BF16, **table})
        self.settings = model_settings(settings, model_folder(layers=1))
        self.folder, self.log, self.store = folder, make_log(self.settings), MemoryStore()
        for partition in (0, 1):
            append(self.log, "samples", *training_outcomes(partition), partition=partition)

    def train(self, hook: Callable[[str], None] = lambda name: None) -> None:
        train(start_trainer(self.log, self.store, self.settings, hook), STEPS)

    def published(self, version: int) -> tuple[str, dict[str, torch.Tensor]]:
        """Digest and tensors of a version's weights."""
        head = read_heads(self.log, "demo", "main", timeout_s=5.0).head
        assert head is not None
        manifest = load_manifest(self.store, "demo", "main", head.name._replace(version=version))
        folder = fetch(self.store, manifest, manifest.digest, self.folder / f"fetched-{version}")
        entry = manifest.file("model.safetensors")
        assert entry is not None
        return entry.sha256, safetensors.torch.load_file(folder / "model.safetensors")

    def facts(self) -> tuple[list[str], str]:
        """Digest of each step's weights, and of the last version's file."""
        return [result.digest for result in ledger_of(self.log).results], self.published(STEPS)[0]

    def checkpoint(self) -> checkpoint.Checkpoint:
        found = checkpoint.newest_eligible(self.folder / "demo" / "main" / "checkpoints", lambda meta: None)
        assert found is not None
        return found


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scene]:
    count = itertools.count()
    return lambda **table: Scene(tmp_path / str(next(count)), **table)


def test_published_files_are_the_master_weights_rounded(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    master, (_, files) = scene.checkpoint().load()["model"], scene.published(STEPS)
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}
    assert {tensor.dtype for tensor in files.values()} == {torch.bfloat16}
    assert master.keys() == files.keys() and len(files) > 5
    for name, tensor in files.items():
        assert torch.equal(tensor, master[name].to(torch.bfloat16)), name
    zero = load_policy(model_folder(layers=1), dtype=BF16)
    assert all(torch.equal(tensor, zero.state_dict()[name]) for name, tensor in scene.published(0)[1].items())


def test_a_trainer_that_died_comes_back_to_the_same_bits(make: Callable[..., Scene]) -> None:
    names: list[str] = []
    undisturbed = make()
    undisturbed.train(names.append)
    assert len(set(undisturbed.facts()[0])) == STEPS
    scene = make()
    with pytest.raises(Crash):
        scene.train(crash_at(names.index("after steps Result") + 4))
    scene.train()
    assert scene.facts() == undisturbed.facts()


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path, make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    found = scene.checkpoint().load()
    policy = scene.settings.policies["main"]
    stepper = stepper_of_settings(policy.train, policy.model)
    stepper.restore(found)
    again = stepper.tensors()
    assert again.keys() == found.keys()
    for part, named in found.items():
        assert named.keys() == again[part].keys()
        assert all(torch.equal(tensor, again[part][name]) for name, tensor in named.items()), part
        assert all(tensor.dtype == again[part][name].dtype for name, tensor in named.items()), part


def test_a_checkpoint_whose_weights_are_bfloat16_is_refused_with_its_reason(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    found, policy = scene.checkpoint(), scene.settings.policies["main"]
    stepper = stepper_of_settings(policy.train, policy.model)
    old = {**found.load(), "model": rounded(stepper.model, stepper.weights())}
    with pytest.raises(
        WeightsError, match=r"in the checkpoint, and weights are trained in torch\.float32: it is of an older"
    ):
        stepper.restore(old)
    kept = checkpoint.save(scene.folder / "old", found.meta, old, keep=1)
    fork = make(fork_from=kept)
    with pytest.raises(SettingError, match=r"fork_from: .*Begin a new run"):
        fork.train()


def test_weights_in_float32_are_published_as_they_are(make: Callable[..., Scene]) -> None:
    scene = make(dtype="float32")
    scene.train()
    stepper = stepper_of_settings(scene.settings.policies["main"].train, model_folder(layers=1))
    stepper.restore(scene.checkpoint().load())
    (data,) = weights_bytes(stepper.model).values()
    files = scene.published(STEPS)[1]
    assert all(torch.equal(tensor, files[name]) for name, tensor in safetensors.torch.load(data).items())
