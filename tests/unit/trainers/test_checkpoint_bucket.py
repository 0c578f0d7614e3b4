"""Checkpoints elsewhere: sent to the bucket and fetched from it, taken as the beginning of another run, saved at a stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.memory_store import MemoryStore
from infra.settings import Settings
from schemas.errors import SettingError
from schemas.records import Announcement
from support.demo import wait_until
from support.loop import StubHeart, append, make_daemon, make_log, said
from support.points import ledger_of
from support.training import ranks_settings, training_outcomes
from trainers import checkpoint, learner
from trainers.checkpoint_bucket import prefix_of
from trainers.crew import reference_folder
from trainers.model import load_policy, weights_digest
from trainers.trainer import Trainer

pytestmark = pytest.mark.model

PREFIX = prefix_of("demo", "main")


class Scene:
    """A run of four steps on a log in memory, which trainers may leave and take up again."""

    def __init__(self, folder: Path, store: MemoryStore | None = None, **train: Any) -> None:
        self.folder = folder
        settings = ranks_settings(folder, ranks=1)
        policy = settings.policies["main"]
        table = policy.train.model_copy(update={"checkpoint_every": 1, **train})
        changed = policy.model_copy(update={"train": table})
        self.settings: Settings = settings.model_copy(update={"policies": {"main": changed}})
        self.log = make_log(self.settings)
        self.store = store or MemoryStore()
        for partition in (0, 1):
            append(self.log, "samples", *training_outcomes(partition), partition=partition)

    def daemon(self) -> Daemon:
        return make_daemon(self.log, self.settings, store=self.store)

    def train(self, steps: int, daemon: Daemon | None = None) -> None:
        trainer = Trainer(daemon or self.daemon(), cast(Heart, StubHeart()))
        try:
            trainer.take_over()
            for _ in range(100):
                if trainer.ledger.steps_done >= steps:
                    break
                trainer.turn()
        finally:
            trainer.close()

    @property
    def disk(self) -> Path:
        return self.folder / "demo" / "main" / "checkpoints"

    def digests(self) -> list[str]:
        return [result.digest for result in ledger_of(self.log).results]

    def in_bucket(self) -> list[str]:
        keys = [info.key.removeprefix(PREFIX) for info in self.store.list(PREFIX)]
        return sorted({key.partition("/")[0] for key in keys})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scene]:
    count = iter(range(100))
    return lambda **given: Scene(tmp_path / str(next(count)), **given)


def test_a_trainer_without_a_disk_goes_on_from_the_bucket_bit_for_bit(make: Callable[..., Scene]) -> None:
    alone = make()
    alone.train(4)
    scene = make(checkpoint_upload=True)
    scene.train(2)
    shutil.rmtree(scene.disk)
    scene.train(4)
    assert scene.digests() == alone.digests()
    kept = scene.in_bucket()
    assert len(kept) == scene.settings.policies["main"].train.checkpoints_kept
    assert kept[-1] == "ck-0002-00000004-1"


def test_without_the_setting_nothing_is_sent_and_nothing_found(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train(2)
    assert scene.in_bucket() == []
    shutil.rmtree(scene.disk)
    with pytest.raises(SettingError, match="or, in the bucket, under demo/main/checkpoints/"):
        scene.train(4)


@pytest.mark.parametrize("file", ["model.safetensors", "meta.json", "COMMIT"])
def test_a_checkpoint_of_the_bucket_that_is_not_whole_is_passed_over(make: Callable[..., Scene], file: str) -> None:
    scene = make(checkpoint_upload=True, checkpoints_kept=9)
    scene.train(1)
    scene.train(2)
    newest, before = f"{PREFIX}ck-0002-00000002-1/{file}", scene.digests()
    data = scene.store.get(newest)
    scene.store.put(newest, data[:-1] + bytes([data[-1] ^ 1]))
    shutil.rmtree(scene.disk)
    scene.train(2)
    assert scene.digests() == before
    assert "ck-0001-00000001-1" in [path.name for path in scene.disk.iterdir()], "the one before was fetched"


def test_a_store_that_is_away_costs_the_copy_and_not_the_step(make: Callable[..., Scene]) -> None:
    scene = make(checkpoint_upload=True)
    real = scene.store.put

    def put(key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if key.startswith(PREFIX):
            scene.store.fail_next(1)
        return real(key, data, if_absent=if_absent)

    scene.store.put = put  # type: ignore[method-assign]  # one store, which is thrown away
    scene.train(2)
    assert len(scene.digests()) == 2 and scene.in_bucket() == []


def test_a_fork_begins_with_another_run_s_weights_under_its_own_settings(make: Callable[..., Scene]) -> None:
    origin = make()
    origin.train(3)
    folder = max(origin.disk.iterdir())
    fork = make(fork_from=folder, learning_rate=0.0)
    fork.train(2)
    assert set(fork.digests()) == {origin.digests()[2]}, "at rate 0 every step leaves the weights as they were"
    assert [record.version for record in said(fork.log, "weights") if isinstance(record, Announcement)] == [0, 1, 2]
    again = make(fork_from=folder, fork_optimizer=False)
    again.train(1)
    taken_along = make(fork_from=folder)
    taken_along.train(1)
    assert again.digests() != taken_along.digests()


def test_a_fork_from_what_is_no_checkpoint_is_refused(make: Callable[..., Scene], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"train\.fork_from: .* is missing.*ck-EPOCH-VERSION-N"):
        make(fork_from=tmp_path).train(1)


def test_a_stop_during_a_long_step_leaves_it_and_saves_the_weights_before_it(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "STOP_GRACE_S", -1.0)  # over as soon as the stop is seen
    scene = make(checkpoint_every=100, steps=0)
    daemon = scene.daemon()
    trainer = Trainer(daemon, cast(Heart, StubHeart()))
    trainer.take_over()
    while trainer.ledger.steps_done < 1:
        trainer.turn()
    daemon.stop.request()
    trainer.turn()
    trainer.end()
    trainer.close()
    ledger = ledger_of(scene.log)
    assert (ledger.steps_planned, ledger.steps_done) == (2, 1)
    found = checkpoint.newest_eligible(scene.disk, lambda meta: None)
    assert found is not None and found.meta.version == 1
    scene.train(4)
    alone = make()
    alone.train(4)
    assert scene.digests() == alone.digests()


def test_weights_that_a_left_step_has_touched_are_not_saved(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(checkpoint_every=100, updates_per_step=2, micro_batch_tokens=10_000, steps=0)
    daemon = scene.daemon()
    trainer = Trainer(daemon, cast(Heart, StubHeart()))
    trainer.take_over()
    while trainer.ledger.steps_done < 1:
        trainer.turn()
    before = weights_digest(trainer._learner._crew.model)
    real = learner.Learner._leave_in_time
    calls: list[int] = []

    def leave(self: learner.Learner) -> None:
        calls.append(1)
        if len(calls) == 4:  # two passes for the proximal, one update, and now
            daemon.stop.request()
            monkeypatch.setattr(learner, "STOP_GRACE_S", -1.0)
        real(self)

    monkeypatch.setattr(learner.Learner, "_leave_in_time", leave)
    trainer.turn()
    assert weights_digest(trainer._learner._crew.model) != before
    trainer.end()
    trainer.close()
    found = checkpoint.newest_eligible(scene.disk, lambda meta: None)
    assert found is not None and found.meta.version == 0


def test_the_grace_begins_when_the_daemon_is_told_to_stop_not_at_the_next_micro_batch(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told within the first micro-batch, which outlasts the grace: the step is left before the second."""
    scene = make(checkpoint_every=100, steps=0)
    daemon = scene.daemon()
    trainer = Trainer(daemon, cast(Heart, StubHeart()))
    trainer.take_over()
    clock_s, asked, real = [1000.0], [0], learner.Learner._leave_in_time
    monkeypatch.setattr(learner, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))

    def leave(self: learner.Learner) -> None:
        asked[0] += 1
        real(self)
        if asked[0] == 1:
            daemon.stop.request()
            wait_until(lambda: self._stop_seen_s > 0, "the thread that waits for the step seeing it")
            clock_s[0] += learner.STOP_GRACE_S + 1.0

    monkeypatch.setattr(learner.Learner, "_leave_in_time", leave)
    while not asked[0]:
        trainer.turn()
    trainer.close()
    assert asked[0] == 2 and trainer.ledger.steps_planned == 1 and trainer.ledger.steps_done == 0


def test_a_pinned_version_is_fetched_as_the_reference(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.train(2)
    policy = scene.settings.policies["main"]

    def pinned(version: str) -> Daemon:
        table = policy.train.model_copy(update={"reference_version": version})
        policies = {"main": policy.model_copy(update={"train": table})}
        return make_daemon(scene.log, scene.settings.model_copy(update={"policies": policies}), store=scene.store)

    folder = reference_folder(pinned("1-1"))
    assert folder is not None
    assert weights_digest(load_policy(folder)) == scene.digests()[0]
    with pytest.raises(SettingError, match="there is no version 1-9"):
        reference_folder(pinned("1-9"))
