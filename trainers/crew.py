"""All ranks as one: what rank 0 asks of its stepper, every other rank does as well, in the same order.

Rank 0 plans, so it alone holds outcomes, checkpoints and the log; the others are given what they need as bytes: plan
and outcomes in the log's own encoding, tensors as safetensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
from torch import Tensor

from infra.daemon import Daemon
from infra.train_settings import TrainTable
from infra.weights.adapter import loadable
from infra.weights.fetch import fetch, load_manifest
from schemas.codec import decode, encode
from schemas.errors import ObjectMissing, SettingError
from schemas.records import Outcome, Plan, Version
from trainers.acceleration import make_accelerator
from trainers.batching import rows_of_step
from trainers.components import Terms, check_fit, make_algorithms
from trainers.metrics import StepMetrics
from trainers.model import Policy, checkpoint_gradients, load_policy, make_deterministic
from trainers.precision import compute_in_bfloat16
from trainers.ranks import Order, Ranks
from trainers.schedule import Optimisation
from trainers.step import Stepper, Tensors


def make_stepper(table: TrainTable, folder: Path, reference: Path | None = None) -> Stepper:
    """The stepper of one rank. `reference`: folder of reference weights, instead of the model's. Raises SettingError."""
    check_fit(loss=table.loss, reduction=table.reduction, corrections=table.corrections)
    algorithms = make_algorithms(
        loss=table.loss,
        correction=table.correction,
        reduction=table.reduction,
        further_corrections=table.further_corrections,
        batch_corrections=table.batch_corrections,
        normalisers=table.normalisers,
        terms=Terms(
            kl=table.kl_coefficient,
            kl_estimator=table.kl_estimator,
            entropy=table.entropy_coefficient,
            value=table.value_coefficient,
            value_clip=table.value_clip,
        ),
        settings=table.settings,
    )
    make_deterministic(table.threads)
    model = trained_policy(folder, table)
    if table.lora_rank:
        from trainers.lora import WithoutAdapter, add_adapter  # peft

        model = add_adapter(model, table)
    if table.gradient_checkpointing:
        checkpoint_gradients(model)
    pinned: Policy | None = None
    if table.lora_rank and reference is None and algorithms.needs_reference:
        pinned = WithoutAdapter(model)
    elif algorithms.needs_reference or reference is not None:
        pinned = pinned_policy(reference or folder, table)
    accelerator = make_accelerator(shard=table.shard, dtype=table.dtype)
    return Stepper(model, algorithms, optimisation(table), accelerator, pinned)


def trained_policy(folder: Path, table: TrainTable) -> Policy:
    """The model that is trained: float32 master weights, computed with in `dtype`. Raises SettingError.

    Under an adapter the weights never move, so they are kept in `dtype` itself. Shards are computed with in bfloat16 by
    FSDP2, which then also sends half as much.
    """
    if table.lora_rank or table.dtype == "float32":
        return load_policy(folder, dtype=table.dtype)
    model = load_policy(folder)
    return model if table.shard else compute_in_bfloat16(model)


def pinned_policy(folder: Path, table: TrainTable) -> Policy:
    """The reference, computed as the model that is trained is: on equal weights both say the same. Raises SettingError."""
    model = load_policy(folder, dtype=table.dtype) if table.shard else trained_policy(folder, table)
    return model.requires_grad_(False)


def optimisation(table: TrainTable) -> Optimisation:
    """How weights are changed, as the settings say."""
    return Optimisation(
        learning_rate=table.learning_rate,
        betas=table.betas,
        weight_decay=table.weight_decay,
        warmup_steps=table.warmup_steps,
        schedule=table.schedule,
        decay_steps=table.decay_steps or max(table.steps - table.warmup_steps, 1),
        floor_share=table.floor_share,
        max_grad_norm=table.max_grad_norm,
        updates_per_step=table.updates_per_step,
        epochs=table.epochs,
        micro_batch_tokens=table.micro_batch_tokens,
    )


def reference_folder(daemon: Daemon) -> Path | None:
    """Where this daemon's reference weights lie; a pinned version is fetched and verified. None: not named.

    Raises StoreError, WeightsError, SettingError.
    """
    table = daemon.table.train
    if not table.reference_version:
        return table.reference
    epoch, _, version = table.reference_version.partition("-")
    run, policy = daemon.settings.run.name, daemon.policy
    try:
        manifest = load_manifest(daemon.store, run, policy, Version(int(epoch), int(version)))
    except ObjectMissing as error:
        raise SettingError(
            f"train.reference_version: there is no version {table.reference_version}: {error}"
        ) from error
    root = daemon.settings.run.folder / run / policy / "reference"
    return loadable(fetch(daemon.store, manifest, manifest.digest, root))


class StepLeft(BaseException):
    """The step is left unfinished between two micro-batches, by all ranks at the same place."""


class Crew:
    """Rank 0's stepper, and through it everybody's."""

    def __init__(
        self, table: TrainTable, folder: Path, config_digest: str, ranks: Ranks, reference: Path | None = None
    ) -> None:
        self._ranks = ranks
        ranks.tell(Order.BUILD, config_digest.encode())
        with ranks.guard("building the model"):
            self._stepper = make_stepper(table, folder, reference)

    @property
    def model(self) -> Policy:
        """The model of this rank."""
        return self._stepper.model

    @property
    def clean(self) -> bool:
        """Whether the weights are those of a whole step."""
        return self._stepper.clean

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back what `tensors` gave, on every rank. Raises WeightsError, RankLost."""
        if self._ranks.size > 1:
            self._ranks.tell(Order.RESTORE, *_as_frames(tensors))
        self._stepper.restore(tensors)

    def execute(
        self, plan: Plan, outcomes: Sequence[Outcome], between: Callable[[], None] = lambda: None
    ) -> StepMetrics:
        """Take a plan's step on every rank. Raises RankLost.

        `between` is called on this rank before each micro-batch; what it raises ends the step on all of them.
        """
        if self._ranks.size > 1:
            self._ranks.tell(Order.EXECUTE, encode(plan), *map(encode, outcomes))
        with self._ranks.guard(f"step {plan.step}"):
            return self._stepper.execute(
                rows_of_step(outcomes, version=plan.step),
                step=plan.step,
                seed=plan.seed,
                between=lambda: self._ask(between),
            )

    def _ask(self, between: Callable[[], None]) -> None:
        try:
            between()
        except BaseException:
            self._ranks.go_on(False)
            raise
        self._ranks.go_on(True)

    def tensors(self) -> Tensors:
        """Everything that the next step depends on, whole; live where it is not in shards."""
        self._ranks.tell(Order.TENSORS)
        with self._ranks.guard("gathering a checkpoint"):
            return self._stepper.tensors()

    def weights(self) -> Mapping[str, Tensor]:
        """Every parameter and saved buffer, whole."""
        self._ranks.tell(Order.WEIGHTS)
        with self._ranks.guard("gathering the weights"):
            return self._stepper.weights()

    def rest(self) -> None:
        """Show the other ranks that this one is there, and see that they are."""
        self._ranks.tell(Order.REST)


def follow(table: TrainTable, folder: Path, config_digest: str, ranks: Ranks, reference: Path | None = None) -> None:
    """Other ranks: do what rank 0 says until it says END. Raises RankLost, SettingError."""
    stepper: Stepper | None = None
    while True:
        order, frames = ranks.hear()
        if order == Order.END:
            ranks.leave()
            return
        with ranks.guard(order.name):
            if order == Order.BUILD:
                _same(config_digest, frames[0].decode())
                stepper = None  # frees the memory of the one before
                stepper = make_stepper(table, folder, reference)
            elif order != Order.REST:
                assert stepper is not None
                _obey(stepper, order, frames, ranks)


def _obey(stepper: Stepper, order: Order, frames: Sequence[bytes], ranks: Ranks) -> None:
    if order == Order.RESTORE:
        stepper.restore(_of_frames(frames))
    elif order == Order.TENSORS:
        stepper.tensors()
    elif order == Order.WEIGHTS:
        stepper.weights()
    elif order == Order.EXECUTE:
        plan, *outcomes = map(decode, frames)
        assert isinstance(plan, Plan)
        taken = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
        rows = rows_of_step(taken, version=plan.step)
        with contextlib.suppress(StepLeft):
            stepper.execute(rows, step=plan.step, seed=plan.seed, between=lambda: _go_on(ranks))


def _go_on(ranks: Ranks) -> None:
    if not ranks.go_on():
        raise StepLeft


def _same(own: str, of_rank_0: str) -> None:
    if own != of_rank_0:
        raise SettingError(
            f"this rank's settings (digest {own[:12]}) are not those of rank 0 ({of_rank_0[:12]}): start every rank "
            "with the same settings"
        )


def _as_frames(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[bytes]:
    frames: list[bytes] = []
    for part, named in tensors.items():
        frames += [part.encode(), safetensors.torch.save({name: t.cpu().contiguous() for name, t in named.items()})]
    return frames


def _of_frames(frames: Sequence[bytes]) -> Tensors:
    pairs = zip(frames[::2], frames[1::2], strict=True)
    return {part.decode(): safetensors.torch.load(data) for part, data in pairs}
