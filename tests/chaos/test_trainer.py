"""Chaos for the trainer: killed at named points, frozen and outlived, over stored samples on a real broker and store.

    OFFSETRL_CHAOS_SEED=7 make prove ARGS=tests/chaos/test_trainer.py

Whatever happens, the digests of all steps are those of an undisturbed run, and nothing is trained twice or left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from infra import wiring
from infra.kafka_log import KafkaLog
from infra.log import Place
from infra.ownership import read_all, read_record
from infra.s3_store import S3Store
from infra.settings import Settings
from infra.weights.announce import read_heads
from infra.weights.fetch import fetch, load_manifest
from schemas.names import topic
from schemas.records import Claim
from support.models import model_folder
from support.servers import session_bootstrap, session_s3
from support.trainer_chaos import POLICY, facts, ledger_of, settings_for, start, store_samples
from trainers import checkpoint
from trainers.model import load_policy, weights_digest

pytestmark = [pytest.mark.broker, pytest.mark.s3, pytest.mark.model, pytest.mark.e2e]
SEED = int(os.environ.get("OFFSETRL_CHAOS_SEED", "1"))
STEPS = 10
KINDS = {
    "steps Claim", "steps Plan", "steps Result", "weights Claim", "weights Announcement", "manifest",
    "checkpoint _write_all", "checkpoint _rename",
}  # fmt: skip
NEVER = -1


@dataclass
class Scene:
    """One run: its samples stand on the broker before any trainer starts."""

    folder: Path
    run: str
    log: KafkaLog
    settings: dict[str, Any]
    _seen: tuple[int, int] = (-1, 0)
    """End of `steps` and the steps done, when looked at last."""

    def start(self, at: int = NEVER, how: signal.Signals = signal.SIGKILL) -> ForkServerProcess:
        return start(self.settings, at, how, self.folder / "notes", self.folder / "output")

    @property
    def points(self) -> list[str]:
        """Names of the points at which a trainer was stopped."""
        notes = self.folder / "notes"
        return notes.read_text().splitlines() if notes.exists() else []

    def wait(self, what: str, done: Callable[[], bool], limit_s: float = 120.0, every_s: float = 0.05) -> None:
        deadline_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline_s, f"{what} did not happen in {limit_s:g} s: {self._said()}"
            time.sleep(every_s)

    def _said(self) -> str:
        output = self.folder / "output"
        return output.read_text()[-3000:] if output.exists() else ""

    def finish(self) -> None:
        """An undisturbed trainer does what is left, and ends when asked to."""
        last = self.start()
        try:
            self.wait(
                "the last announcement", lambda: last.exitcode is not None or self.announced == STEPS, every_s=0.5
            )
            last.terminate()
            last.join(30)
            assert last.exitcode == 0, self._said()
        finally:
            end(last)

    @property
    def steps_done(self) -> int:
        """From the log, unless nothing was added since it was looked at last."""
        end = self.log.bounds(topic(self.run, POLICY, "steps"))[0].end
        if end != self._seen[0]:
            self._seen = (end, ledger_of(self.log, self.run).steps_done)
        return self._seen[1]

    @property
    def announced(self) -> int:
        head = read_heads(self.log, self.run, POLICY, timeout_s=10.0).head
        return -1 if head is None else head.name.version

    def published(self) -> str:
        """Digest of the weights that an engine would load now."""
        head = read_heads(self.log, self.run, POLICY, timeout_s=10.0).head
        assert head is not None
        with contextlib.closing(cast(S3Store, wiring.open_store(Settings.model_validate(self.settings), ""))) as store:
            manifest = load_manifest(store, self.run, POLICY, head.name, head.digest)
            folder = fetch(store, manifest, manifest.digest, self.folder / "fetched")
        return weights_digest(load_policy(folder))


def end(process: ForkServerProcess) -> None:
    """No process is left, frozen ones neither."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(10)


@pytest.fixture(scope="module")
def log() -> Iterator[KafkaLog]:
    log = KafkaLog(session_bootstrap())
    yield log
    log.close()


@pytest.fixture(scope="module")
def make(log: KafkaLog, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    def made(kind: str) -> Scene:
        folder, run = tmp_path_factory.mktemp(kind), f"{kind}-{time.time_ns() % 10**10}"
        model = model_folder(layers=1)
        settings = settings_for(folder, model, session_bootstrap(), session_s3(), run=run, steps=STEPS)
        store_samples(log, Settings.model_validate(settings), 2 * STEPS)
        return Scene(folder, run, log, settings)

    return made


@pytest.fixture(scope="module")
def undisturbed(make: Callable[[str], Scene]) -> tuple[Any, str]:
    """Facts of a run that nobody disturbs, and its last weights."""
    scene = make("undisturbed")
    scene.finish()
    found = facts(scene.log, scene.run)
    digests, trained = found
    assert len(digests) == STEPS and len({key[1:] for key in trained}) == len(trained) == 2 * STEPS
    assert scene.published() == digests[-1]
    return found, digests[-1]


def _kill_often(scene: Scene, kills: int, seed: int) -> None:
    """Kill `kills` trainers, each at a point drawn by the seed; some get far, some die in their first breath."""
    rng = random.Random(f"trainer/{seed}")
    print(f"OFFSETRL_CHAOS_SEED={seed}")
    while (before := len(scene.points)) < kills and scene.steps_done < STEPS:
        victim = scene.start(rng.choice([rng.randrange(8), rng.randrange(8, 16)]))
        try:
            scene.wait("a kill", functools.partial(_killed_or_done, scene, before), every_s=0.2)
            victim.join(1.0)  # where all is done it goes on waiting, and is ended here
        finally:
            end(victim)


def _killed_or_done(scene: Scene, kills_before: int) -> bool:
    return len(scene.points) > kills_before or scene.steps_done == STEPS


def _check(scene: Scene, undisturbed: tuple[Any, str]) -> None:
    scene.finish()
    expected, weights = undisturbed
    assert facts(scene.log, scene.run) == expected
    assert scene.published() == weights


def test_killed_ten_times_the_weights_are_those_of_an_undisturbed_run(
    make: Callable[[str], Scene], undisturbed: tuple[Any, str]
) -> None:
    scene = make("killed")
    _kill_often(scene, 10, SEED)
    assert len(scene.points) >= 5, scene.points
    _check(scene, undisturbed)


@pytest.mark.prove
def test_killed_fifty_times_at_every_kind_of_point(make: Callable[[str], Scene], undisturbed: tuple[Any, str]) -> None:
    seen: set[str] = set()
    kills, seed = 0, SEED
    while kills < 50 or not {name.split(" ", 1)[1] for name in seen} >= KINDS:
        assert seed < SEED + 40, f"{KINDS} were not all met: {sorted(seen)}"
        scene = make(f"killed-{seed}")
        _kill_often(scene, 12, seed)
        _check(scene, undisturbed)
        seen.update(scene.points)
        kills, seed = kills + len(scene.points), seed + 1
    print(kills, sorted(seen))


@pytest.mark.parametrize("at", [6, *(pytest.param(n, marks=pytest.mark.prove) for n in (2, 9, 12, 15, 21, 27))])
def test_a_frozen_trainer_that_comes_back_has_no_effect(
    make: Callable[[str], Scene], undisturbed: tuple[Any, str], at: int
) -> None:
    """Its successor does all that is left; the one that wakes up ends with exit code 4, and nothing of it counts."""
    scene = make("zombie")
    zombie = scene.start(at, signal.SIGSTOP)
    try:
        scene.wait("the freeze", lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_STOPPED)
        scene.finish()
        expected, weights = undisturbed
        assert facts(scene.log, scene.run) == expected
        assert zombie.pid is not None
        os.kill(zombie.pid, signal.SIGCONT)
        scene.wait("the zombie's end", lambda: zombie.exitcode is not None)
        assert zombie.exitcode == 4
    finally:
        end(zombie)
    assert facts(scene.log, scene.run) == expected
    assert scene.published() == weights
    root = scene.folder / scene.run / POLICY / "checkpoints"
    newest = checkpoint.newest_eligible(root, lambda meta: None)
    assert newest is not None and newest.meta.version == STEPS
    claims = num_claims(scene)  # a trainer that froze early has made none
    again = scene.start()  # and a later trainer goes on from the successor's checkpoint
    try:
        scene.wait("a new start", lambda: num_claims(scene) == claims + 1)
    finally:
        end(again)
    assert facts(scene.log, scene.run) == expected


def num_claims(scene: Scene) -> int:
    """Claims on `steps` so far."""
    place = Place(topic(scene.run, POLICY, "steps"), 0)
    return sum(isinstance(read_record(e), Claim) for e in read_all(scene.log, place, scene.log.bounds(place.topic)[0]))
