"""Two dispatchers at once: one frozen between two of its writes and revived, the other killed between any two of its own.

The daemons are the real ones on a log in memory (support.simulation). Support.watcher asserts at every record that no
more groups are asked for than admission allows; here the books must close and whoever was overtaken must end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.audit import audit
from producers.dispatch_state import DispatchState
from producers.dispatcher import Dispatcher
from support.loop import POLICY, RUN
from support.silence import silence
from support.simulation import Crash, Process, Simulation, _SimWriter, install

NUM_WRITES = 80
"""More than the writes of any dispatcher in one of these runs that matter: claims, requests, close records."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence():
        yield


class Scene:
    """The first dispatcher freezes before its write number `freeze_at`, the second one dies before its number `kill_at`."""

    def __init__(self, seed: int, folder: Path, *, freeze_at: int, kill_at: int, standby: bool = False) -> None:
        tables: dict[str, Any] = {
            "dispatch": {"standby": standby},
            "train": {"steps": 6},
            "rollout": {"partial_tokens": seed % 2},
        }
        self.sim = Simulation(seed, folder, **tables)
        self.sim.fail_rate = 0.0
        self.rng = random.Random(f"two/{seed}/{freeze_at}/{kill_at}")
        self._freeze_at, self._kill_at = freeze_at, kill_at
        self.writes: Counter[Process] = Counter()
        self.first: Process | None = None
        self.second: Process | None = None
        self.frozen = self.killed = False

    def before_write(self, process: Process) -> None:
        """Every write of a dispatcher passes here; what happens, happens before it."""
        if process.role != "dispatch":
            return
        number = self.writes[process]
        self.writes[process] += 1
        if process is self.first and number == self._freeze_at and self.second is None:
            self.frozen = True
            self.second = self.sim.start("dispatch", self.rng.choice(("dispatch", "other")))
            process.frozen_until_s = self.sim.now_s + self.rng.choice((0.2, 1.0, 3.0, 8.0))
            process.pause()
        elif process is self.second and number == self._kill_at:
            self.killed = process.killed = True
            raise Crash

    def run(self) -> None:
        sim = self.sim
        try:
            for role, name in (("train", ""), ("process", ""), ("rollout", "w0"), ("rollout", "w1")):
                sim.start(role, name)
            self.first = sim.start("dispatch")
            sim.until(lambda: self.frozen or sim._published())
            sim.until(lambda: self.killed or sim._published())
            if self.rng.random() < 0.5:
                until_s = sim.now_s + self.rng.random() * 2
                sim.until(lambda: sim.now_s >= until_s or sim._published())
            sim.start("dispatch", "third")
            sim.until(lambda: not any(p.frozen_until_s > sim.now_s for p in sim.living()))
            sim.calm()
            sim.until(sim._published)
            sim.drain()
        finally:
            sim.end()

    def check(self) -> None:
        found = audit(self.sim.log, RUN, POLICY, max_tokens=10_000)
        accounts, watcher = found.accounts, self.sim.watcher
        assert accounts.ok, accounts.findings
        assert (accounts.pending, accounts.unaccounted, accounts.twice) == (0, 0, 0), accounts
        assert found.ledger.steps_done == 6 and found.max_staleness_seen <= watcher.eta
        assert watcher.joined <= watcher.ended, f"never closed: {sorted(watcher.joined - watcher.ended)}"
        dispatchers = [process for process in self.sim.processes if process.role == "dispatch"]
        assert {process.code for process in dispatchers if not process.killed} <= {0, 4}


def play(seed: int, folder: Path, **points: Any) -> Scene:
    scene = Scene(seed, folder, **points)
    real = _SimWriter.send

    def send(self: _SimWriter, *args: Any, **kwargs: Any) -> Any:
        scene.before_write(self._process)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        install(patch, scene.sim)
        patch.setattr(_SimWriter, "send", send)
        try:
            scene.run()
            scene.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {points}: {error}") from error
    return scene


def drawn(seed: int) -> dict[str, int]:
    """Points of a seed: early writes (claims) as likely as all later ones."""
    rng = random.Random(seed)
    return {
        "freeze_at": rng.choice((rng.randrange(5), rng.randrange(NUM_WRITES))),
        "kill_at": rng.choice((rng.randrange(5), rng.randrange(NUM_WRITES // 2))),
    }


@pytest.mark.parametrize("seed", range(3))
def test_one_frozen_and_revived_and_one_killed(seed: int, tmp_path: Path) -> None:
    play(seed, tmp_path, **drawn(seed))


@pytest.mark.parametrize("seed", range(1))
def test_the_same_with_standbys(seed: int, tmp_path: Path) -> None:
    play(seed, tmp_path, **drawn(seed + 1000), standby=True)


@pytest.mark.prove
@pytest.mark.parametrize("kill_at", range(0, 48))
def test_one_killed_between_any_two_writes(kill_at: int, tmp_path: Path) -> None:
    for freeze_at in range(0, NUM_WRITES, 5):
        play(kill_at * 100 + freeze_at, tmp_path, freeze_at=freeze_at, kill_at=kill_at)


@pytest.mark.prove
def test_many_seeds(tmp_path: Path) -> None:
    for seed in range(100, 400):
        play(seed, tmp_path, **drawn(seed), standby=seed % 4 == 0)


def test_the_points_are_reached_and_the_revived_one_ends_with_code_4(tmp_path: Path) -> None:
    scene = play(5, tmp_path, freeze_at=10, kill_at=6)
    assert scene.frozen and scene.killed
    assert scene.first is not None and scene.first.code == 4


def _void_requests_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("infra.ownership.Ownership.proves", lambda self, envelope, epoch, nonce: True)


def _admits_what_it_forgot(patch: pytest.MonkeyPatch) -> None:
    real = DispatchState.caught_up

    def forgetful(self: DispatchState, now_s: float, **known: Any) -> None:
        real(self, now_s, **known)
        self.backlog.clear()

    patch.setattr(DispatchState, "caught_up", forgetful)


def _leaves_out_members(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_ask_missing", lambda self: 0)


@pytest.mark.prove
@pytest.mark.parametrize("bug", [_void_requests_count, _admits_what_it_forgot, _leaves_out_members])
def test_each_planted_bug_is_found(bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(60):
        try:
            play(seed, tmp_path, freeze_at=random.Random(seed).randrange(8, 40), kill_at=seed % 20)
        except AssertionError:
            return
    raise AssertionError(f"{bug.__name__}: not noticed in 60 runs")
