"""The real learner on a tiny model: a trainer may die at any write, and the weights come out the same, bit for bit."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.weights.announce import read_heads
from infra.weights.fetch import fetch, load_manifest
from schemas.errors import LogTruncated, SettingError, Superseded
from schemas.records import Announcement, Member, Outcome
from schemas.rules.ledger import Ledger
from support.loop import append, make_daemon, make_log, make_settings, said
from support.models import model_folder
from support.outcomes import make_outcome
from support.points import Crash, Hook, crash_at, ledger_of, model_settings, start_trainer, train
from support.training import make_member
from trainers import checkpoint
from trainers.learner import Learner
from trainers.model import load_policy, weights_digest
from trainers.trainer import Trainer

pytestmark = pytest.mark.model

STEPS = 4


def nothing(name: str) -> None:
    """No point of interest."""


class Scene:
    """A log with outcomes for four steps on it, a store, and a folder of checkpoints."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **table: Any) -> None:
        settings: Settings = make_settings(
            folder,
            train={
                "batch_groups": 2, "max_staleness": 8, "checkpoint_every": 2, "steps": STEPS, "learning_rate": 1e-3,
                "publish_every": 1, **table,
            },
        )  # fmt: skip
        self.settings = model_settings(settings, model_folder(layers=1))
        self.folder, self._patch = folder, patch
        self.log: MemoryLog = make_log(self.settings)
        self.store = MemoryStore()
        for partition in (0, 1):
            append(self.log, "samples", *outcomes(partition), partition=partition)

    def start(self, hook: Hook = nothing) -> Trainer:
        self._points_of_checkpoints(hook)
        return start_trainer(self.log, self.store, self.settings, hook)

    def train(self, hook: Hook = nothing) -> None:
        train(self.start(hook), STEPS)

    def _points_of_checkpoints(self, hook: Hook) -> None:
        for name in ("_write_all", "_rename", "_remove_old"):
            real = REAL[name]

            def wrapped(*args: Any, _real: Callable[..., Any] = real, _name: str = name, **kwargs: Any) -> Any:
                hook(f"before checkpoint {_name}")
                done = _real(*args, **kwargs)
                hook(f"after checkpoint {_name}")
                return done

            self._patch.setattr(checkpoint, name, wrapped)

    def facts(self) -> tuple[list[str], str, list[tuple[int, int]]]:
        """Digest of each step, of the weights that stand in the store, and what was trained on when."""
        ledger: Ledger = ledger_of(self.log)
        head = read_heads(self.log, "demo", "main", timeout_s=5.0).head
        assert head is not None and head.name.version == STEPS
        manifest = load_manifest(self.store, "demo", "main", head.name, head.digest)
        weights = fetch(self.store, manifest, manifest.digest, self.folder / "fetched")
        eaten = [(step, address.closing_offset) for step, address in ledger.trained()]
        return [result.digest for result in ledger.results], weights_digest(load_policy(weights)), eaten


REAL = {name: getattr(checkpoint, name) for name in ("_write_all", "_rename", "_remove_old")}


def outcomes(partition: int) -> list[Outcome]:
    """Four kept groups of two members with tokens of their own, a dropped one, and a repeat."""
    rng = random.Random(partition)
    found: list[Outcome] = []
    for n in range(5):
        closing = 3 * n + 2
        members = tuple(member(rng, index, 3 * n + index) for index in range(2))
        record = make_outcome(closing_offset=closing, previous=closing - 3 if n else -1, partition=partition)
        record = replace(record, group=f"g{partition}{n}", group_size=2, members=members)
        found.append(replace(record, disposition="zero-spread") if n == 2 else record)
    return [found[0], *found]


def member(rng: random.Random, index: int, offset: int) -> Member:
    tokens: Sequence[int] = [rng.randrange(2, 20) for _ in range(8)]
    advantage = rng.uniform(-1, 1)
    return make_member(tokens, [0, 0, 0, 1, 1, 1, 1, 1], index=index, offset=offset, advantage=advantage)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    count = iter(range(10_000))

    def made(**table: Any) -> Scene:
        return Scene(tmp_path / str(next(count)), monkeypatch, **table)

    return made


def points(make: Callable[..., Scene]) -> tuple[list[str], tuple[Any, ...]]:
    """Names of the points of an undisturbed run, and its facts."""
    names: list[str] = []
    scene = make()
    scene.train(names.append)
    return names, scene.facts()


def check(scene: Scene, expected: tuple[Any, ...]) -> None:
    assert scene.facts() == expected
    trained = [key for _, key in enumerate(scene.facts()[2])]
    assert len({(step, closing) for step, closing in trained}) == len(trained)


def crash_and_go_on(make: Callable[..., Scene], number: int, expected: tuple[Any, ...]) -> None:
    scene = make()
    with pytest.raises(Crash):
        scene.train(crash_at(number))
    scene.train()
    check(scene, expected)


def one_of_each(names: list[str]) -> list[int]:
    """The last point of each name: by then there is most to lose."""
    return sorted({name: number for number, name in enumerate(names)}.values())


def test_killed_at_any_kind_of_point_the_weights_are_the_same(make: Callable[..., Scene]) -> None:
    names, expected = points(make)
    assert {name.split(" ", 1)[1] for name in names} >= {
        "steps Claim", "steps Plan", "steps Result", "weights Claim", "weights Announcement", "manifest",
        "checkpoint _write_all", "checkpoint _rename",
    }  # fmt: skip
    for number in one_of_each(names):
        crash_and_go_on(make, number, expected)


@pytest.mark.prove
def test_killed_at_every_point_the_weights_are_the_same(make: Callable[..., Scene]) -> None:
    names, expected = points(make)
    for number in range(len(names)):
        crash_and_go_on(make, number, expected)


@pytest.mark.prove
def test_killed_at_any_two_points_the_weights_are_the_same(make: Callable[..., Scene]) -> None:
    names, expected = points(make)
    rng = random.Random(7)
    for _ in range(60):
        scene = make()
        for _ in range(2):
            try:
                scene.train(crash_at(rng.randrange(len(names))))
            except Crash:
                continue
        scene.train()
        check(scene, expected)


def freeze_and_go_on(make: Callable[..., Scene], number: int, expected: tuple[Any, ...]) -> None:
    """At its n-th point a trainer stands still while a successor does everything; then it goes on."""
    scene = make()
    after: list[object] = []
    count = itertools.count()

    def hook(name: str) -> None:
        if next(count) == number:
            scene.train()
            after.append(accepted(scene))

    frozen = scene.start(hook)
    try:
        train(frozen, STEPS)
    except Superseded:
        assert len(after) == 1
    assert [accepted(scene)] == after, "something of the frozen trainer's counts"
    check(scene, expected)


def test_frozen_at_any_kind_of_point_a_trainer_gets_nothing_through_afterwards(make: Callable[..., Scene]) -> None:
    names, expected = points(make)
    kinds = {number for number in one_of_each(names) if names[number].startswith("before")}
    for number in sorted(kinds - set(range(names.index("after steps Claim")))):
        freeze_and_go_on(make, number, expected)


@pytest.mark.prove
def test_frozen_at_every_point_a_trainer_gets_nothing_through_afterwards(make: Callable[..., Scene]) -> None:
    names, expected = points(make)
    for number in range(names.index("after steps Claim"), len(names)):
        freeze_and_go_on(make, number, expected)


def accepted(scene: Scene) -> object:
    """Everything that counts on the log."""
    ledger = ledger_of(scene.log)
    return ledger.plans, ledger.results, ledger.drops, read_heads(scene.log, "demo", "main", timeout_s=5.0)


def test_version_0_is_the_model_as_it_is_trained_with_its_tokenizer(make: Callable[..., Scene]) -> None:
    scene = make()
    trainer = scene.start()
    trainer.take_over()
    trainer.close()
    (said_0,) = [r for r in said(scene.log, "weights") if isinstance(r, Announcement)]
    head = read_heads(scene.log, "demo", "main", timeout_s=5.0).head
    assert head is not None
    manifest = load_manifest(scene.store, "demo", "main", head.name, said_0.manifest_digest)
    folder = fetch(scene.store, manifest, manifest.digest, scene.folder / "fetched")
    assert weights_digest(load_policy(folder)) == weights_digest(load_policy(model_folder(layers=1)))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_without_its_checkpoints_a_claimed_policy_is_not_trained(make: Callable[..., Scene]) -> None:

    scene = make()
    scene.train()
    shutil.rmtree(scene.folder / "demo" / "main" / "checkpoints")
    with pytest.raises(SettingError, match="bring the checkpoints here"):
        scene.start().take_over()


def test_a_log_that_holds_another_plan_than_a_checkpoint_saw_stops_the_trainer(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    learner = Learner(make_daemon(scene.log, scene.settings))
    ledger = ledger_of(scene.log)
    offset, plan = ledger.plans[STEPS - 1]
    ledger.plans[STEPS - 1] = (offset, replace(plan, seed=plan.seed + 1))
    with pytest.raises(LogTruncated, match=rf"offset {offset} of steps, but the log holds another plan there"):
        learner.load(ledger, first=False)


def test_a_log_that_ends_before_a_checkpoint_s_plan_stops_the_trainer(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    with pytest.raises(LogTruncated, match="but the log ends at 0"):
        Learner(make_daemon(scene.log, scene.settings)).load(Ledger(), first=True)


def test_a_checkpoint_of_a_plan_that_does_not_count_is_passed_over(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train()
    learner = Learner(make_daemon(scene.log, scene.settings))
    ledger = ledger_of(scene.log)
    del ledger.plans[STEPS - 1]  # as if a superseded trainer had written it
    learner.load(ledger, first=False)
    assert learner.version == STEPS - 2


def test_updates_and_micro_batches_go_through_a_crash_too(make: Callable[..., Scene]) -> None:
    table = {"updates_per_step": 2, "micro_batch_tokens": 16}
    alone = make(**table)
    alone.train()
    scene = make(**table)
    with pytest.raises(Crash):
        scene.train(crash_at(30))
    scene.train()
    assert scene.facts() == alone.facts()
