"""The learner: a policy's weights at a version, how plans change them, and their checkpoints. Speaks to no broker."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from infra.config import config_digest
from infra.daemon import Daemon
from infra.weights.publish import Source, model_files
from schemas.codec import encode
from schemas.errors import LogTruncated, SettingError, Superseded, WeightsError
from schemas.records import Outcome, Plan
from schemas.rules.ledger import Ledger
from trainers import checkpoint
from trainers.backlog import SamplesPosition
from trainers.beside import beside
from trainers.checkpoint import Meta
from trainers.checkpoint_bucket import Uploads, fetch_newest, prefix_of
from trainers.crew import Crew, StepLeft, reference_folder
from trainers.health import Health
from trainers.metrics import StepMetrics
from trainers.model import tensors_digest, weights_bytes
from trainers.precision import rounded
from trainers.ranks import join

if TYPE_CHECKING:
    from trainers.lora import LoraFiles

STOP_GRACE_S = 15.0
"""A step that lasts longer than this after the daemon was told to stop is left: its plan will be executed again."""
REST_S = 2.0
"""Between signs of life to the other ranks; also how soon it is seen that one of them has died."""
_LOG = structlog.get_logger("offsetrl.learner")
_INDEX = "model.safetensors.index.json"


class Learner:
    """Weights at `version`. Belongs to one thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._run, self._policy, self._stop = daemon.settings.run.name, daemon.policy, daemon.stop
        self._table, self._folder = daemon.table.train, daemon.table.model
        self._root: Path = daemon.settings.run.folder / self._run / self._policy / "checkpoints"
        self.config_digest = config_digest(daemon.settings, daemon.policy)
        self.version = 0
        """Completed steps."""
        self._saved = -1
        self._store, self._prefix = daemon.store, prefix_of(self._run, self._policy)
        self._uploads: Uploads | None = None
        self._ranks = join(self._table.rank_timeout_s)
        self._crew = Crew(self._table, self._folder, self.config_digest, self._ranks, reference_folder(daemon))
        self._lora = self._lora_files()
        folder = daemon.settings.run.folder / self._run / self._policy / "health"
        self._health = Health(self._table.trackers, self._run, self._policy, folder)
        self._stop_seen_s = self._rested_s = 0.0

    def _lora_files(self) -> LoraFiles | None:
        if not self._table.lora_rank:
            return None
        from trainers.lora import LoraFiles  # peft

        return LoraFiles(self._crew.model, self._table)

    @property
    def _base(self) -> str:
        return self._lora.base_digest if self._lora else ""

    def load(self, ledger: Ledger, *, first: bool) -> Mapping[int, SamplesPosition]:
        """Load the newest checkpoint whose last plan counts; where to read samples from.

        Raises SettingError without one, LogTruncated when the log is not the one that a checkpoint was trained from.

        `first`: nobody has claimed this policy before, so the model's own weights become checkpoint 0.
        """
        plans = dict(ledger.plans)

        def objection(meta: Meta) -> str | None:
            if (meta.run, meta.policy) != (self._run, self._policy):
                return f"it belongs to {meta.run}.{meta.policy}"
            self._check_base(meta)
            if meta.version == 0:
                return None
            plan = plans.get(meta.plan_offset)
            if meta.plan_offset >= ledger.end or (plan is not None and plan_digest(plan) != meta.plan_digest):
                raise LogTruncated(
                    f"{self._run}.{self._policy}: a checkpoint of version {meta.version} under {self._root} was trained from "
                    f"a plan at offset {meta.plan_offset} of steps, but the log {_instead(ledger, meta)}: the log was "
                    "truncated or made anew. Restore it, or go on under another run name"
                )
            if plan is None or plan.step != meta.plan_step:
                return f"its last plan, of step {meta.plan_step} at offset {meta.plan_offset}, does not count"
            return None

        found = checkpoint.newest_eligible(self._root, objection)
        if found is None and not first:
            found = fetch_newest(self._store, self._prefix, self._root, objection)
        if found is None and not first:
            raise SettingError(
                f"trainers of {self._run}.{self._policy} have claimed steps before, but no checkpoint that counts is "
                f"under {self._root} or, in the bucket, under {self._prefix}: bring the checkpoints here (run.folder), "
                "or start a run with another name"
            )
        if found is None:
            if self._table.fork_from is not None:
                self._fork(self._table.fork_from)
            self._save(self._meta(-1, None, {}))
            return {}
        self._crew.restore(found.load())
        self.version = self._saved = found.meta.version
        _LOG.info("checkpoint loaded", folder=str(found.folder), version=self.version)
        return found.meta.samples

    def _check_base(self, meta: Meta) -> None:
        """Raise SettingError for a checkpoint with an adapter on other weights than these, or of none."""
        if meta.base != self._base:
            known = f"an adapter on weights {meta.base[:16]}" if meta.base else "all weights, without an adapter"
            wanted = f"an adapter on weights {self._base[:16]}" if self._base else "all weights"
            raise SettingError(
                f"the checkpoint of {meta.run}.{meta.policy} at version {meta.version} holds {known}, and this trainer "
                f"trains {wanted}: keep the model and lora_rank, or begin a new run"
            )

    def _fork(self, folder: Path) -> None:
        """Begin with the weights of another run's checkpoint. Raises SettingError."""
        try:
            found = checkpoint.read(folder)
            self._check_base(found.meta)
            tensors = found.load()
            self._crew.restore(tensors if self._table.fork_optimizer else {"model": tensors["model"]})
        except WeightsError as error:
            raise SettingError(
                f"train.fork_from: {error}. It takes a checkpoint's folder (ck-EPOCH-VERSION-N) of the same model; with "
                "fork_optimizer = false only weights are taken"
            ) from error
        _LOG.info(
            "forked", folder=str(folder), run=found.meta.run, policy=found.meta.policy, version=found.meta.version
        )

    def execute(
        self, plan: Plan, outcomes: Sequence[Outcome], meanwhile: Callable[[], None] | None = None
    ) -> dict[str, float] | None:
        """Execute a plan on these weights; the step's metrics. None: the step was left, since the daemon has to end.

        meanwhile: called again and again in this thread while another one takes the step.
        """
        assert plan.step == self.version, (plan.step, self.version)
        try:
            if meanwhile is None:
                metrics = self._crew.execute(plan, outcomes)
            else:
                metrics = beside(
                    lambda: self._crew.execute(plan, outcomes, self._leave_in_time), lambda: self._look(meanwhile)
                )
        except StepLeft:
            _LOG.warning(
                "told to stop: the step is left, and its plan is executed again at the next start", step=plan.step
            )
            return None
        self.version = plan.step + 1
        return plain(metrics)

    def _leave_in_time(self) -> None:
        """Before each micro-batch; the other ranks leave where this one does."""
        self._look()
        if self._stop_seen_s and time.monotonic() - self._stop_seen_s > STOP_GRACE_S:
            raise StepLeft

    def _look(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Notes when the daemon is told to stop, while a micro-batch runs too: it may last as long as the grace itself."""
        if self._stop.requested and not self._stop_seen_s:
            self._stop_seen_s = time.monotonic()
        meanwhile()

    def rest(self) -> None:
        """There is no step to take now; other ranks are told so now and then, or they would take this one for lost."""
        if self._ranks.size > 1 and time.monotonic() - self._rested_s > REST_S:
            self._crew.rest()
            self._rested_s = time.monotonic()

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's figures to the trackers."""
        self._health.log(step, metrics)

    def close(self) -> None:
        """Let the trackers write out what they hold, and the bucket get the newest checkpoint."""
        self._health.close()
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None

    @property
    def digest(self) -> str:
        """SHA-256 over the weights as they are trained (float32), or over the adapter: what the next step begins with."""
        return tensors_digest(self._crew.weights())

    def files(self) -> dict[str, Source]:
        """The weights as the files of a version."""
        if self._lora is not None:
            return self._lora.files(self._crew.weights())
        model, in_bfloat16 = self._crew.model, self._table.dtype == "bfloat16"
        tensors = self._crew.weights() if self._table.shard or in_bfloat16 else None
        return {**weights_bytes(model, tensors=rounded(model, tensors) if tensors and in_bfloat16 else tensors)}

    def first_files(self) -> dict[str, Source]:
        """Version 0: the weights as they are trained, with the model's configuration, tokenizer and chat template."""
        given = model_files(self._folder)
        beside = {name: path for name, path in given.items() if not name.endswith(".safetensors") and name != _INDEX}
        return {**beside, **self.files()}

    def checkpoint(self, offset: int, plan: Plan, samples: Mapping[int, SamplesPosition], *, force: bool) -> None:
        """Save after a step: every `checkpoint_every` steps, or when forced."""
        if force or self.version % self._table.checkpoint_every == 0:
            self._save(self._meta(offset, plan, samples))

    def checkpoint_now(self, samples: Mapping[int, SamplesPosition], ledger: Ledger) -> None:
        """Save what is not saved yet."""
        if 0 < self.version != self._saved and self._crew.clean:
            self._save(self._meta(*ledger.plans[self.version - 1], samples))

    def _meta(self, offset: int, plan: Plan | None, samples: Mapping[int, SamplesPosition]) -> Meta:
        return Meta(
            run=self._run,
            policy=self._policy,
            epoch=plan.epoch if plan else 0,
            version=self.version,
            plan_step=plan.step if plan else -1,
            plan_offset=offset,
            plan_digest=plan_digest(plan) if plan else "",
            steps_offset=offset + 1,
            samples=samples,
            base=self._base,
        )

    def _save(self, meta: Meta) -> None:
        try:
            folder = checkpoint.save(self._root, meta, self._crew.tensors(), keep=self._table.checkpoints_kept)
            self._saved = meta.version
            if self._table.checkpoint_upload:
                self._uploads = self._uploads or Uploads(self._store, self._prefix, self._table.checkpoints_kept)
                self._uploads.put(folder)
        except OSError as error:
            if meta.version == 0 and isinstance(error, FileNotFoundError):
                raise Superseded(
                    f"what this trainer wrote of its first checkpoint under {self._root} is gone: another trainer of "
                    f"{self._run}.{self._policy} has begun meanwhile, and this one ends"
                ) from error
            if meta.version == 0:
                raise SettingError(f"the first checkpoint cannot be written under {self._root}: {error}") from error
            _LOG.error("checkpoint not written; the one before stays", version=meta.version, error=str(error))


def plain(metrics: StepMetrics) -> dict[str, float]:
    """The figures of a step by name, as its result carries them."""
    fields = dataclasses.asdict(metrics)
    figures = fields.pop("figures")
    return {name: float(value) for name, value in {**fields, **figures}.items() if isinstance(value, numbers.Real)}


def _instead(ledger: Ledger, meta: Meta) -> str:
    """What the log holds in the place of a checkpoint's plan."""
    return f"ends at {ledger.end}" if meta.plan_offset >= ledger.end else "holds another plan there"


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan's record on the log."""
    return hashlib.sha256(encode(plan)).hexdigest()
