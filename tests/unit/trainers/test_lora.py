"""LoRA: the base never changes, both ways of publishing give the trainer's own log-probs, and restarts give the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from pydantic import ValidationError

from infra.memory_store import MemoryStore
from infra.settings import RolloutTable
from infra.train_settings import TrainTable
from infra.weights.adapter import ADAPTER_CONFIG_NAME, ADAPTER_NAME, loadable, merged, read_adapter
from infra.weights.announce import read_heads
from infra.weights.fetch import fetch, load_manifest
from infra.weights.manifest import Manifest
from producers.engine import GenerationRequest
from producers.engines import make_engine
from schemas.errors import SettingError
from schemas.records import Sampling, Version
from support.loop import append, make_daemon, make_log, make_settings
from support.models import model_folder
from support.points import Crash, Hook, crash_at, ledger_of, model_settings, start_trainer, train
from support.training import make_row, random_rows, training_outcomes
from trainers import checkpoint
from trainers.batching import pad
from trainers.crew import make_stepper, reference_folder
from trainers.lora import LoraFiles
from trainers.model import frozen_tensors, load_policy, token_logprobs, weights_bytes, weights_digest

pytestmark = pytest.mark.model

STEPS = 4
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}


class Scene:
    """Four steps' outcomes on a log, a store, and a folder of checkpoints."""

    def __init__(self, folder: Path, **table: Any) -> None:
        given = {"batch_groups": 2, "max_staleness": 8, "checkpoint_every": 1, "steps": STEPS, "learning_rate": 1e-2}
        settings = make_settings(folder, train={**given, **LORA, **table})
        self.settings = model_settings(settings, table.pop("model", None) or model_folder(layers=1))
        self.folder, self.log, self.store = folder, make_log(self.settings), MemoryStore()
        for partition in (0, 1):
            append(self.log, "samples", *training_outcomes(partition), partition=partition)

    def train(self, hook: Hook = lambda name: None, steps: int = STEPS) -> None:
        train(start_trainer(self.log, self.store, self.settings, hook), steps)

    def again(self, **table: Any) -> None:
        """The same run under other settings."""
        policy = self.settings.policies["main"]
        changed = TrainTable(**{**policy.train.model_dump(), **table})
        policies = {"main": policy.model_copy(update={"train": changed})}
        self.settings = self.settings.model_copy(update={"policies": policies})

    def manifest(self, version: int | None = None) -> Manifest:
        head = read_heads(self.log, "demo", "main", timeout_s=5.0).head
        assert head is not None
        name = head.name if version is None else Version(head.name.epoch, version)
        return load_manifest(self.store, "demo", "main", name)

    def fetched(self) -> Path:
        manifest = self.manifest()
        return fetch(self.store, manifest, manifest.digest, self.folder / "fetched")

    def digests(self) -> list[str]:
        return [result.digest for result in ledger_of(self.log).results]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scene]:
    count = iter(range(10_000))
    return lambda **table: Scene(tmp_path / str(next(count)), **table)


def sampled(folder: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What the light engine draws from a folder's weights."""
    table = RolloutTable(engine="transformers", dtype="float32", threads=1, max_model_len=64)
    engine = make_engine("transformers", folder=folder, version=Version(1, 0), table=table)
    engine.submit(GenerationRequest(id="a", prompt=(3, 4, 5, 6), sampling=Sampling(max_tokens=24), seed=7))
    while engine.num_running:
        for generation in engine.step():
            return generation.tokens, generation.logprobs
    raise AssertionError("nothing came")


def test_both_ways_of_publishing_give_one_engine_and_the_trainer_the_same_log_probs(make: Callable[..., Scene]) -> None:
    scenes = [make(lora_publish=how) for how in ("merged", "adapter")]
    folders = []
    for scene in scenes:
        scene.train()
        folders.append(loadable(scene.fetched()))
    assert scenes[0].digests() == scenes[1].digests()
    assert weights_digest(load_policy(folders[0])) == weights_digest(load_policy(folders[1]))
    (tokens, one), (same, two) = map(sampled, folders)
    assert tokens == same and one == pytest.approx(two, abs=1e-5)
    assert sampled(model_folder(layers=1))[1] != pytest.approx(one, abs=1e-3)

    stepper = make_stepper(scenes[0].settings.policies["main"].train, model_folder(layers=1))
    newest = checkpoint.newest_eligible(scenes[0].folder / "demo" / "main" / "checkpoints", lambda meta: None)
    assert newest is not None and newest.meta.version == STEPS
    stepper.restore(newest.load())
    row = make_row([3, 4, 5, 6, *tokens], [0] * 4 + [1] * len(tokens))
    with torch.no_grad():
        own = token_logprobs(stepper.model, pad([row]))[0, 4:]
    assert own.tolist() == pytest.approx(one, abs=1e-5)


def test_peft_reads_a_published_adapter(make: Callable[..., Scene]) -> None:
    scene = make(lora_publish="adapter", lora_targets=["q_proj", "down_proj"])
    scene.train(steps=STEPS)
    folder = scene.fetched()
    base = load_policy(model_folder(layers=1))
    theirs = PeftModel.from_pretrained(base, folder).eval()
    row = pad([make_row(list(range(2, 18)), [0] * 4 + [1] * 12)])
    with torch.no_grad():
        expected = token_logprobs(theirs, row)
        found = token_logprobs(load_policy(loadable(folder)), row)
    assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert set(json.loads((folder / ADAPTER_CONFIG_NAME).read_text())["target_modules"]) == {"q_proj", "down_proj"}


def test_versions_share_the_base_s_blob_and_version_0_is_the_base(make: Callable[..., Scene]) -> None:
    scene = make(lora_publish="adapter")
    scene.train()
    first, last = scene.manifest(0), scene.manifest()
    assert first.file("model.safetensors") == last.file("model.safetensors")
    assert first.file(ADAPTER_NAME) != last.file(ADAPTER_NAME)
    whole = make()
    whole.train()
    assert whole.manifest(0).file("model.safetensors") == first.file("model.safetensors")
    assert {entry.name for entry in whole.manifest().files}.isdisjoint((ADAPTER_NAME, ADAPTER_CONFIG_NAME))
    assert whole.manifest().file("model.safetensors") != first.file("model.safetensors")


def test_a_trainer_may_die_anywhere_and_checkpoints_hold_the_adapter_alone(make: Callable[..., Scene]) -> None:
    names: list[str] = []
    undisturbed = make(lora_publish="adapter")
    undisturbed.train(names.append)
    expected = undisturbed.digests(), undisturbed.manifest().file(ADAPTER_NAME)
    for number in range(2, len(names), 7):
        scene = make(lora_publish="adapter")
        with pytest.raises(Crash):
            scene.train(crash_at(number))
        scene.train()
        assert (scene.digests(), scene.manifest().file(ADAPTER_NAME)) == expected, names[number]
    newest = checkpoint.newest_eligible(undisturbed.folder / "demo" / "main" / "checkpoints", lambda meta: None)
    assert newest is not None and newest.meta.base
    parts = newest.load()
    assert len(parts["model"]) == 2 * 7 and all(".lora_" in name for name in parts["model"])
    assert {name.split(".")[0] for name in parts["optimizer"]} == {str(n) for n in range(14)}


def test_a_step_moves_the_adapter_and_nothing_else() -> None:
    table = TrainTable(**LORA, learning_rate=1e-2, correction="token-truncated")
    stepper = make_stepper(table, model_folder())
    base = weights_digest(load_policy(model_folder()))
    before = {name: tensor.clone() for name, tensor in stepper.weights().items()}
    assert LoraFiles(stepper.model, table).base_digest == base
    metrics = stepper.execute(random_rows(8), step=0, seed=0).as_dict()
    assert metrics["grad_norm"] > 0 and metrics["updates_skipped"] == 0 and metrics["lag_kl"] > 0
    moved = {name for name, tensor in stepper.weights().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_B." in name}, "A's gradient is 0 while B is 0"
    stepper.execute(random_rows(8), step=1, seed=1)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in stepper.weights().items())
    assert LoraFiles(stepper.model, table).base_digest == base


def test_the_first_step_has_the_loss_and_log_probs_of_the_base() -> None:
    """B is 0, so nothing is added yet; gradient checkpointing changes no bit."""
    rows = random_rows(8)
    whole = make_stepper(TrainTable(learning_rate=1e-3), model_folder()).execute(rows, step=0, seed=0).as_dict()
    digests = set()
    for checkpointed in (False, True):
        table = TrainTable(**LORA, learning_rate=1e-3, gradient_checkpointing=checkpointed)
        stepper = make_stepper(table, model_folder())
        found = stepper.execute(rows, step=0, seed=0).as_dict()
        assert (found["loss"], found["lag_kl"]) == pytest.approx((whole["loss"], whole["lag_kl"]), rel=1e-6)
        stepper.execute(rows, step=1, seed=1)
        digests.add(weights_digest(stepper.model))
    assert len(digests) == 1


def test_the_reference_is_the_base_with_the_adapter_off() -> None:
    table = TrainTable(**LORA, learning_rate=1e-2, kl_coefficient=0.1)
    stepper = make_stepper(table, model_folder())
    first, second = (stepper.execute(random_rows(8), step=n, seed=n).as_dict() for n in range(2))
    named = make_stepper(table, model_folder(), reference=model_folder())
    expected = [named.execute(random_rows(8), step=n, seed=n).as_dict() for n in range(2)]
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] > 1e-5
    assert second["kl"] == pytest.approx(expected[1]["kl"], rel=1e-4)
    assert weights_digest(stepper.model) == weights_digest(named.model)


def test_bfloat16_weights_get_a_float32_adapter_and_are_merged_like_torch_rounds() -> None:
    table = TrainTable(**LORA, learning_rate=1e-1, dtype="bfloat16")
    stepper = make_stepper(table, model_folder())
    for step in range(3):
        stepper.execute(random_rows(8), step=step, seed=step)
    assert {tensor.dtype for tensor in stepper.weights().values()} == {torch.float32}
    files = LoraFiles(stepper.model, table).files(stepper.weights())
    data = files["model.safetensors"]
    assert isinstance(data, bytes)
    found, base, own = safetensors.torch.load(data), frozen_tensors(stepper.model), stepper.weights()
    name = "model.layers.0.mlp.down_proj"
    a_RI, b_OR = (own[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
    expected = (base[f"{name}.weight"].float() + 2.0 * (b_OR @ a_RI)).bfloat16()
    assert found[f"{name}.weight"].dtype == torch.bfloat16
    differing = (found[f"{name}.weight"] != expected).float().mean()
    assert differing < 1e-3 and not torch.equal(found[f"{name}.weight"], base[f"{name}.weight"])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"lora_rank": 4, "shard": True}, "lora_rank and shard exclude each other"),
        ({"lora_publish": "adapter"}, "without an adapter"),
        ({"lora_targets": ["q_proj"]}, "without an adapter"),
        ({"lora_rank": -1}, "greater than or equal to 0"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "greater than 0"),
        ({"lora_rank": 4, "lora_publish": "both"}, "'merged' or 'adapter'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainTable(**table)


@pytest.mark.parametrize("target", ["q_prok", "lm_head", "embed_tokens"])
def test_targets_are_linear_layers_of_the_model(target: str) -> None:
    with pytest.raises(SettingError, match=rf"\['{target}'\] name no linear layer .*'down_proj'"):
        make_stepper(TrainTable(lora_rank=4, lora_targets=["q_proj", target]), model_folder())


def test_checkpoints_of_another_kind_are_refused(make: Callable[..., Scene], tmp_path: Path) -> None:
    whole = make(lora_rank=0, lora_alpha=32.0)
    whole.train(steps=1)
    whole.again(**LORA)
    with pytest.raises(
        SettingError, match="holds all weights, without an adapter, and this trainer trains an adapter on"
    ):
        whole.train()
    scene = make()
    scene.train(steps=1)
    scene.again(lora_rank=0)
    with pytest.raises(SettingError, match=r"holds an adapter on weights .* trains all weights"):
        scene.train()
    scene.again(**LORA)
    scene.settings = model_settings(scene.settings, model_folder(1, layers=1))
    with pytest.raises(SettingError, match=r"holds an adapter on weights .* trains an adapter on weights"):
        scene.train()


def test_a_folder_with_an_adapter_beside_it_is_no_model(make: Callable[..., Scene]) -> None:
    scene = make(lora_publish="adapter")
    scene.train(steps=1)
    with pytest.raises(SettingError, match="with the adapter merged in"):
        load_policy(scene.fetched())


def test_one_run_may_change_the_way_it_publishes(make: Callable[..., Scene]) -> None:
    scene = make(lora_publish="adapter")
    scene.train(steps=2)
    scene.again(lora_publish="merged")
    scene.train()
    whole = make()
    whole.train()
    assert weights_digest(load_policy(scene.fetched())) == weights_digest(load_policy(whole.fetched()))
    assert ADAPTER_CONFIG_NAME not in {entry.name for entry in scene.manifest().files}


def test_a_fork_begins_with_the_adapter_and_a_pinned_version_is_merged(make: Callable[..., Scene]) -> None:
    old = make(lora_publish="adapter")
    old.train(steps=2)
    expected = weights_digest(load_policy(loadable(old.fetched())))
    newest = checkpoint.newest_eligible(old.folder / "demo" / "main" / "checkpoints", lambda meta: None)
    assert newest is not None and newest.meta.version == 2
    fork = make(fork_from=newest.folder)
    fork.train(steps=1)
    manifest = fork.manifest(0)
    zero = fetch(fork.store, manifest, manifest.digest, fork.folder / "fetched")
    assert weights_digest(load_policy(zero)) == expected

    old.again(reference_version=f"{old.manifest().epoch}-2")
    folder = reference_folder(make_daemon(old.log, old.settings, store=old.store))
    assert folder is not None and weights_digest(load_policy(folder)) == expected
    full = make(fork_from=newest.folder, lora_rank=0)
    with pytest.raises(SettingError, match="holds an adapter on weights"):
        full.train(steps=1)


def test_merging_again_what_was_published_apart_gives_the_published_bytes() -> None:
    """Merged by the trainer, or by whoever fetches: one function."""
    stepper = make_stepper(TrainTable(**LORA, learning_rate=1e-2), model_folder())
    stepper.execute(random_rows(8), step=0, seed=0)
    apart = LoraFiles(stepper.model, TrainTable(**LORA, lora_publish="adapter")).files(stepper.weights())
    whole = LoraFiles(stepper.model, TrainTable(**LORA)).files(stepper.weights())
    config, data = apart[ADAPTER_CONFIG_NAME], apart[ADAPTER_NAME]
    assert isinstance(config, bytes) and isinstance(data, bytes)
    base = weights_bytes(load_policy(model_folder()))
    assert dict(merged(read_adapter(config, data), base.items())) == whole
    assert len(data) < 0.5 * len(base["model.safetensors"])
