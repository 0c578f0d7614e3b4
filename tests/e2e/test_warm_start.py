"""A warm start in one process: demonstrations are imported, processed, trained on and measured, by the real daemons' parts.

The log and the store are in memory; tokenizer, model, training and the measuring engine are the real ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from consumers.processor import make_processor
from infra.audit import Audit, audit
from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.lifecycle import Stop
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.provision import topic_specs
from infra.settings import Settings
from producers.agenda import Wanted
from producers.environments.sort_digits import sort_digits
from producers.evaluator import Evaluator
from producers.importer import Importer, Sent, Source
from producers.tokenizer import Tokenizer
from schemas.records import Eval, Plan, Result
from schemas.rules.planning import NO_LOGPROBS
from support.loop import POLICY, RUN, StubHeart, said
from trainers.new_model import create
from trainers.trainer import Trainer

pytestmark = [pytest.mark.model, pytest.mark.e2e]

LINES, PASSES, BATCH = 64, 5, 16
STEPS = LINES * PASSES // BATCH


class Scene:
    """A run with a small model, and the demonstrations of its task."""

    def __init__(self, folder: Path, **train: Any) -> None:
        model = folder / "model"
        create(model, alphabet="0123>", layers=2, hidden=64, heads=2, max_positions=32, tie=False, seed=3)
        learning = {
            "loss": "supervised",
            "correction": "none",
            "max_staleness": 0,
            "batch_groups": BATCH,
            "steps": STEPS,
        }
        policy = {
            "model": str(model),
            "task": {"environment": "sort-digits", "settings": {"digits": 2, "alphabet": "0123"}},
            "sampling": {"max_tokens": 4},
            "dispatch": {"group_size": 1},
            "rollout": {"engine": "transformers", "max_model_len": 16},
            "process": {"group_filters": [], "advantage": "reward"},
            "train": {**learning, "learning_rate": 1e-2, "betas": [0.9, 0.95], **train},
            "eval": {"episodes": 32},
        }
        run = {"name": RUN, "folder": str(folder / "runs"), "partitions": 2}
        self.settings = Settings.model_validate({"run": run, "policies": {POLICY: policy}})
        self.log, self.store = MemoryLog(), MemoryStore()
        self.log.create(topic_specs(self.settings))
        self.daemon = Daemon(self.settings, POLICY, "one", "", self.log, self.store, Stop())
        self.model = model

    def demonstrate(self) -> Sent:
        """The answers to the first items of the task, onto the log."""
        environment, rows = sort_digits(0, digits=2, alphabet="0123"), []
        for item in range(LINES):
            session = environment.open(item, "", 0)
            rows.append({"prompt": session.observe().text, "completion": session.expected})
        codec = Tokenizer(self.model)
        source = Source(
            name="demos.jsonl", data=b"\n".join(json.dumps(row).encode() for row in rows), codec=codec,
            tokenizer=codec.digest, max_tokens=16, vocab_size=7,
        )  # fmt: skip
        source.check()
        return Importer(self.log, self.settings, POLICY).send(source, PASSES)

    def process(self) -> None:
        """All that stands on the log now."""
        processor = make_processor(self.daemon)
        while sum(bounds.end for bounds in self.log.bounds(f"{RUN}.{POLICY}.samples").values()) < LINES * PASSES:
            processor.turn(0.0)
        processor.drain()
        processor.close()

    def train(self, turns: int) -> None:
        """So many turns of a trainer, and its end."""
        trainer = Trainer(self.daemon, cast(Heart, StubHeart()))
        trainer.take_over()
        for _ in range(turns):
            trainer.turn()
        trainer.end()
        trainer.close()

    def measure(self, version: str) -> Eval:
        """What a version is worth."""
        evaluator = Evaluator(self.daemon, cast(Heart, StubHeart()), Wanted(version=version))
        while not evaluator.done:
            evaluator.turn()
        evaluator.close()
        found = evaluator.agenda.result()
        assert found is not None
        return found

    def books(self) -> Audit:
        return audit(self.log, RUN, POLICY, max_tokens=99)


def test_a_policy_learns_from_demonstrations_and_is_measured(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.demonstrate() == Sent(LINES * PASSES, 0)
    assert scene.demonstrate() == Sent(0, LINES * PASSES)
    scene.process()
    scene.train(STEPS + 2)
    results = [record for record in said(scene.log, "steps") if isinstance(record, Result)]
    losses = [result.metrics["loss"] for result in results]
    assert len(losses) == STEPS
    assert losses[0] > 1.5 and losses[-1] < 0.5 * losses[0], losses
    books = scene.books()
    assert books.accounts.ok and books.accounts.trained == LINES * PASSES and books.accounts.pending == 0
    assert books.max_staleness_seen == -1, "what no weights made has no age"
    before, after = scene.measure("1-0"), scene.measure(f"1-{STEPS}")
    assert before.high is not None and after.low is not None and before.high < after.low


def test_a_loss_that_needs_logprobs_sets_demonstrations_aside(tmp_path: Path) -> None:
    scene = Scene(tmp_path, loss="ppo-clip", correction="token-truncated", max_staleness=1)
    scene.demonstrate()
    scene.process()
    scene.train(2)
    plans = [record for record in said(scene.log, "steps") if isinstance(record, Plan)]
    assert plans and not any(plan.samples for plan in plans)
    assert {drop.reason for plan in plans for drop in plan.drops} == {NO_LOGPROBS}
    accounts = scene.books().accounts
    assert accounts.ok and accounts.drops_by_reason == {NO_LOGPROBS: LINES * PASSES}
