"""The learner: a policy's weights at a version, how plans change them, and their checkpoints. Speaks to no broker."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from infra.config import config_digest
from infra.daemon import Daemon
from infra.weights.publish import model_files
from schemas.codec import encode
from schemas.errors import LogTruncated, SettingError
from schemas.records import KEPT, Outcome, Plan
from schemas.rules.ledger import Ledger
from trainers import checkpoint
from trainers.backlog import SamplesPosition
from trainers.batching import rows_of
from trainers.checkpoint import Meta
from trainers.components import make_algorithms
from trainers.model import load_policy, make_deterministic, weights_bytes, weights_digest
from trainers.step import Optimisation, Stepper

_LOG = structlog.get_logger("offsetrl.learner")
_INDEX = "model.safetensors.index.json"


class Learner:
    """Weights at `version`. Belongs to one thread."""

    def __init__(self, daemon: Daemon) -> None:
        self._run, self._policy = daemon.settings.run.name, daemon.policy
        self._table, self._folder = daemon.table.train, daemon.table.model
        self._root: Path = daemon.settings.run.folder / self._run / self._policy / "checkpoints"
        self.config_digest = config_digest(daemon.settings, daemon.policy)
        self.version = 0
        """Completed steps."""
        self._saved = -1
        table = self._table
        algorithms = make_algorithms(
            loss=table.loss, correction=table.correction, reduction=table.reduction, settings=table.settings
        )
        make_deterministic(table.threads)
        how = Optimisation(
            learning_rate=table.learning_rate,
            betas=table.betas,
            weight_decay=table.weight_decay,
            warmup_steps=table.warmup_steps,
            max_grad_norm=table.max_grad_norm,
            updates_per_step=table.updates_per_step,
            micro_batch_tokens=table.micro_batch_tokens,
        )
        self._stepper = Stepper(load_policy(self._folder, dtype=table.dtype), algorithms, how)

    def load(self, ledger: Ledger, *, first: bool) -> Mapping[int, SamplesPosition]:
        """Load the newest checkpoint whose last plan counts; where to read samples from.

        Raises SettingError without one, LogTruncated when the log is not the one that a checkpoint was trained from.

        `first`: nobody has claimed this policy before, so the model's own weights become checkpoint 0.
        """
        plans = dict(ledger.plans)

        def objection(meta: Meta) -> str | None:
            if (meta.run, meta.policy) != (self._run, self._policy):
                return f"it belongs to {meta.run}.{meta.policy}"
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
            raise SettingError(
                f"trainers of {self._run}.{self._policy} have claimed steps before, but no checkpoint that counts is "
                f"under {self._root}: bring the checkpoints here (run.folder), or start a run with another name"
            )
        if found is None:
            self._save(self._meta(-1, None, {}))
            return {}
        self._stepper.restore(found.load())
        self.version = self._saved = found.meta.version
        _LOG.info("checkpoint loaded", folder=str(found.folder), version=self.version)
        return found.meta.samples

    def execute(self, plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Execute a plan on these weights; the step's metrics."""
        assert plan.step == self.version, (plan.step, self.version)
        kept = [member for outcome in outcomes for member in outcome.members if member.disposition == KEPT]
        metrics = self._stepper.execute(rows_of(kept), step=plan.step, seed=plan.seed)
        self.version = plan.step + 1
        plain = dataclasses.asdict(metrics)
        figures = plain.pop("figures")
        return {name: float(value) for name, value in {**plain, **figures}.items() if isinstance(value, numbers.Real)}

    @property
    def digest(self) -> str:
        """SHA-256 over the weights."""
        return weights_digest(self._stepper.model)

    def files(self) -> dict[str, bytes | Path]:
        """The weights as the files of a version."""
        return {**weights_bytes(self._stepper.model)}

    def first_files(self) -> dict[str, bytes | Path]:
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
        if 0 < self.version != self._saved:
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
        )

    def _save(self, meta: Meta) -> None:
        try:
            checkpoint.save(self._root, meta, self._stepper.tensors(), keep=self._table.checkpoints_kept)
            self._saved = meta.version
        except OSError as error:
            if meta.version == 0:
                raise SettingError(f"the first checkpoint cannot be written under {self._root}: {error}") from error
            _LOG.error("checkpoint not written; the one before stays", version=meta.version, error=str(error))


def _instead(ledger: Ledger, meta: Meta) -> str:
    """What the log holds in the place of a checkpoint's plan."""
    return f"ends at {ledger.end}" if meta.plan_offset >= ledger.end else "holds another plan there"


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan's record on the log."""
    return hashlib.sha256(encode(plan)).hexdigest()
