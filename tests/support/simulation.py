"""A whole run in one process: real daemons on a log in memory, each in a thread that moves only when a seeded scheduler lets it.

Every call to the log or the store is a point at which its process may be killed, frozen for a while (and come back as a
zombie), or overtaken by a second one of its role. Time is a number that the scheduler moves. Nothing runs at the same
time, so a seed gives the same run each time.
"""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import consumers.assignment
import consumers.partitions
import consumers.processor
import consumers.sharing
import infra.ownership
import infra.weights.announce
import producers.dispatcher
import producers.inbox
import producers.outbox
import producers.rollout_worker
import producers.standby
import trainers.own_ledger
import trainers.samples_reader
import trainers.trainer
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Ack, Bounds, Committed, Envelope, Log, Pending, Place, Reader, Writer
from infra.memory_store import MemoryStore
from infra.weights.announce import Heads, fold_envelopes
from infra.weights.follower import FetchedWeights
from producers.outbox import Outbox
from schemas.codec import encode
from schemas.errors import Superseded
from schemas.names import commit_group, control_topic, topic
from schemas.records import Heartbeat, Outcome, Plan, State, Version
from schemas.rules.ledger import Ledger
from support.loop import EPOCH_MS, LOCAL, POLICY, RUN, Codec, InlineCalls, current, make_daemon, make_log, make_settings
from support.watcher import Watcher
from trainers.backlog import SamplesPosition

_STEP_LIMIT = 60_000


class Crash(BaseException):
    """The process is gone."""


class Process:
    """A daemon in its thread; `pause` gives the turn away."""

    def __init__(self, sim: Simulation, role: str, name: str, body: Callable[[Daemon], int]) -> None:
        self.sim, self.role, self.name = sim, role, name
        self.stop = SimStop(self)
        self.daemon = make_daemon(SimLog(self), sim.settings, name=name, store=SimStore(self), stop=self.stop)
        self.wake_s, self.frozen_until_s, self.since_s = sim.now_s, 0.0, sim.now_s
        self.killed = self.done = False
        self.error: BaseException | None = None
        self.code: int | None = None
        self.finished: list[bytes] = []
        """Trajectories that it finished."""
        self._go = threading.Semaphore(0)
        self._body = body
        self.thread = threading.Thread(target=self._main, name=f"{role}-{name}", daemon=True)
        self.thread.start()

    def resume(self) -> None:
        """Let it go on up to its next point."""
        self.since_s = self.sim.now_s
        self._go.release()
        self.sim.baton.acquire()

    def pause(self, seconds: float = 0.0) -> None:
        """A point. Raises Crash when the process is killed here."""
        if self.killed:
            raise Crash
        self.wake_s = self.sim.now_s + seconds
        self.sim.baton.release()
        self._go.acquire()
        if self.killed:
            raise Crash

    def kill(self) -> None:
        """End it where it stands."""
        if not self.done:
            self.killed = True
            self.resume()

    def _main(self) -> None:
        self._go.acquire()
        LOCAL.process = self
        try:
            if not self.killed:
                self.code = self._body(self.daemon)
        except Crash:
            pass
        except Superseded:
            self.code = 4
        except BaseException as error:  # noqa: BLE001  # the scheduler raises it in the test's thread
            self.error = error
        finally:
            self.done = True
            self.sim.baton.release()


class SimStop(Stop):
    """Waits in the simulation's time."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def wait(self, timeout_s: float) -> bool:
        if not self.requested:
            self._process.pause(timeout_s)
        return self.requested


class SimLog:
    """One process's way to the log."""

    def __init__(self, process: Process) -> None:
        self.process, self.base = process, process.sim.log

    def reader(self, positions: Mapping[Place, int]) -> Reader:
        self.process.pause()
        return _SimReader(self.process, self.base.reader(positions))

    def writer(self) -> Writer:
        self.process.pause()
        return _SimWriter(self.process, self.base.writer())

    def bounds(self, topic: str) -> dict[int, Bounds]:
        return self.base.bounds(topic)

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        self.process.pause()
        self.base.commit(group, positions)
        self.process.pause()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


class _SimReader:
    def __init__(self, process: Process, base: Reader) -> None:
        self._process, self._base = process, base
        self.position, self.end, self.seek, self.close = base.position, base.end, base.seek, base.close

    def poll(self, timeout_s: float, max_records: int = 1000) -> list[Envelope]:
        self._process.pause()
        most = self._process.sim.rng.choice((1, 3, 1000)) if self._process.sim.faults else max_records
        if not (found := self._base.poll(0.0, most)) and timeout_s > 0:
            self._process.pause(timeout_s)
            found = self._base.poll(0.0, most)
        return found


class _SimWriter:
    def __init__(self, process: Process, base: Writer) -> None:
        self._process, self._base, self.close = process, base, base.close

    def send(self, topic: str, partition: int, value: bytes, key: bytes | None = None, headers: Any = ()) -> Pending:
        self._process.pause()
        sim = self._process.sim
        if sim.faults and sim.rng.random() < sim.fail_rate:
            sim.log.fail_sends(1, present=sim.rng.random() < 0.5)
        pending = self._base.send(topic, partition, value, key, headers)
        sim.watcher.look()
        self._process.pause()
        return _SimPending(self._process, pending)

    def flush(self, timeout_s: float) -> None:
        self._process.pause()
        self._base.flush(timeout_s)


class _SimPending:
    def __init__(self, process: Process, base: Pending) -> None:
        self._process, self._base, self.done = process, base, base.done

    def result(self, timeout_s: float) -> Ack:
        self._process.pause()
        return self._base.result(timeout_s)


class SimStore:
    """One process's way to the store."""

    def __init__(self, process: Process) -> None:
        self._process, self._base = process, process.sim.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        mine = threading.current_thread() is self._process.thread  # blobs are sent by threads of their own
        if mine:
            self._process.pause()
        done = self._base.put(key, data, if_absent=if_absent)
        if mine:
            self._process.pause()
        return done


class KnownStore(MemoryStore):
    """Says what is there without failing."""

    def has(self, key: str) -> bool:
        return key in self._objects


class SimHeart:
    """Heartbeats at once, in the daemon's own thread."""

    def __init__(self, daemon: Daemon, role: str, hold_s: float = 0.0) -> None:
        process = current()
        assert process is not None
        self._process, self._daemon, self._role = process, daemon, role
        process.sim.sessions += 1
        self.session = f"{process.sim.sessions:08x}"
        self._last = (-1e9, State.UNKNOWN)

    def beat(self, state: State = State.SERVING, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        sim = self._process.sim
        if self._process.killed or (state == self._last[1] and sim.now_s - self._last[0] < 0.3):
            return
        self._last = (sim.now_s, state)
        record = Heartbeat(
            run=RUN, policy=POLICY, role=self._role, name=self._daemon.name, session=self.session, state=state,
            metrics=dict(metrics or {}), **fields,
        )  # fmt: skip
        sim.say(control_topic(RUN), encode(record), f"{self._role}/{POLICY}/{self._daemon.name}".encode())

    def close(self, timeout_s: float = 0.0) -> None:
        self.beat(State.LEFT)


class SimFollower:
    """Newest weights as the log announces them, without fetching anything."""

    def __init__(self, log: Log, store: Any, run: str, policy: str, root: Path, poll_s: float = 0.5) -> None:
        process = current()
        assert process is not None
        self._process, self.error = process, ""
        self._heads = Heads(run, policy)
        self._place = Place(topic(run, policy, "weights"), 0)
        self._reader: Reader | None = None
        self._taken: Version | None = None

    def take(self) -> FetchedWeights | None:
        sim = self._process.sim
        if not sim.log.away:
            self._reader = self._reader or sim.log.reader({self._place: 0})
            self._heads = fold_envelopes(self._heads, self._reader.poll(0.0))
        head = self._heads.head
        if head is None or (self._taken is not None and head.name <= self._taken):
            return None
        assert sim.store.has(head.key), "announced before it was whole"
        self._taken = head.name
        return FetchedWeights(head.name, sim.folder, head.digest)

    def wait_first(self, timeout_s: float, stop: Stop) -> FetchedWeights | None:
        while not stop.requested:
            if (found := self.take()) is not None:
                return found
            self._process.pause(0.1)
        return None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def step_digest(before: bytes, plan: Plan, outcomes: Iterable[Outcome]) -> bytes:
    """What the counting learner makes of a plan: a digest over everything that a step may depend on."""
    digest = hashlib.sha256(before + str(plan.seed).encode())
    for outcome in outcomes:
        digest.update(encode(outcome))
    return digest.digest()


Disk = list[tuple[int, bytes, int, Plan | None, Mapping[int, SamplesPosition]]]


class CountingLearner:
    """Weights are a digest of everything they went through; checkpoints lie on `disk`; `point` is called around writes."""

    def __init__(
        self,
        daemon: Daemon,
        disk: Disk,
        executes: Callable[[Plan], None] = lambda plan: None,
        point: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._disk, self._executes, self._point = disk, executes, point
        self._table = daemon.table.train
        self.config_digest, self.version, self._weights = "cd" * 32, 0, bytes(32)

    def load(self, ledger: Ledger, *, first: bool) -> Mapping[int, SamplesPosition]:
        plans = dict(ledger.plans)
        for version, weights, offset, plan, samples in reversed(self._disk):
            if version == 0 or plans.get(offset) == plan:
                self.version, self._weights = version, weights
                return samples
        assert first, "claimed before, and no checkpoint"
        self._save(-1, None, {})
        return {}

    def execute(
        self, plan: Plan, outcomes: Sequence[Outcome], meanwhile: Callable[[], None] | None = None
    ) -> dict[str, float]:
        assert plan.step == self.version
        self._executes(plan)
        self._point(0.1)
        self._weights = step_digest(self._weights, plan, outcomes)
        self.version += 1
        return {"rows": float(len(outcomes))}

    def rest(self) -> None:
        pass

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def digest(self) -> str:
        return self._weights.hex()

    def files(self) -> dict[str, bytes | Path]:
        weights = np.frombuffer(self._weights, dtype=np.uint8)
        return {"model.safetensors": safetensors.numpy.save({"w": weights})}

    def first_files(self) -> dict[str, bytes | Path]:
        return {"config.json": b"{}", **self.files()}

    def checkpoint(self, offset: int, plan: Plan, samples: Mapping[int, SamplesPosition], *, force: bool) -> None:
        if force or self.version % self._table.checkpoint_every == 0:
            self._save(offset, plan, samples)

    def checkpoint_now(self, samples: Mapping[int, SamplesPosition], ledger: Ledger) -> None:
        if self.version:
            self._save(*ledger.plans[self.version - 1], samples)

    def _save(self, offset: int, plan: Plan | None, samples: Mapping[int, SamplesPosition]) -> None:
        self._point(0.0)
        self._disk.append((self.version, self._weights, offset, plan, dict(samples)))
        self._disk.sort(key=lambda entry: (entry[3].epoch if entry[3] else 0, entry[0]))
        del self._disk[:-2]
        self._point(0.0)


class Simulation:
    """The scheduler: `run` lets faults happen for a while, then lets the run end, drains it in order and returns."""

    def __init__(self, seed: int, folder: Path, **tables: Mapping[str, Any]) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.settings = make_settings(folder, **tables)
        self.now_s = 0.0
        self.log = make_log(self.settings, clock_ms=lambda: EPOCH_MS + int(self.now_s * 1000))
        self.store = KnownStore()
        self.disk: Disk = []
        self.baton = threading.Semaphore(0)
        self.faults, self.fail_rate = True, 0.01
        self.sessions = self.born = 0
        self.happened: list[str] = []
        self.processes: list[Process] = []
        self.watcher = Watcher(self.log, self.settings)
        self._back_at_s = 0.0
        self._steps = 0

    # Processes

    def start(self, role: str, name: str = "") -> Process:
        """Start a daemon."""
        bodies = {
            "dispatch": producers.dispatcher.run,
            "rollout": producers.rollout_worker.run,
            "process": consumers.processor.run,
            "train": trainers.trainer.run,
        }
        self.born += 1
        process = Process(self, role, name or role, bodies[role])
        self.processes.append(process)
        return process

    def living(self, role: str = "") -> list[Process]:
        """Processes that have not ended."""
        return [p for p in self.processes if not p.done and role in ("", p.role)]

    def say(self, name: str, value: bytes, key: bytes) -> None:
        """Append a record without any fault; while the broker is away it is lost."""
        if not self.log.away:
            writer = self.log.writer()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.log, "_failing", [])
                writer.send(name, 0, value, key)

    # Time

    def turn(self) -> None:
        """Let one process go on to its next point."""
        self._steps += 1
        assert self._steps < _STEP_LIMIT, f"no end after {self._steps} turns: {self.watcher}"
        if self.log.away and self.now_s >= self._back_at_s:
            self.log.away = False
        ready = [p for p in self.living() if p.frozen_until_s <= self.now_s]
        awake = [p for p in ready if p.wake_s <= self.now_s]
        if not awake:
            times = [max(p.wake_s, p.frozen_until_s) for p in self.living()]
            assert times, "everything has ended"
            self.now_s = max(self.now_s, min(times))
            return
        self.now_s += 0.0005
        process = self.rng.choice(awake)
        process.resume()
        self.watcher.look()
        if process.error is not None:
            raise AssertionError(f"{process.role} {process.name} failed") from process.error

    def until(self, reached: Callable[[], bool], limit_s: float = 600.0) -> None:
        """Turns until something is so."""
        end_s = self.now_s + limit_s
        while not reached():
            assert self.now_s < end_s, f"not reached within {limit_s} s: {self.watcher}"
            self.turn()

    # The run

    def run(self, num_faults: int = 14) -> None:
        """Everything, with so many faults."""
        try:
            for role, name in (("train", ""), ("process", ""), ("dispatch", ""), ("rollout", "w0"), ("rollout", "w1")):
                self.start(role, name)
            for _ in range(num_faults):
                until_s = self.now_s + self.rng.expovariate(1 / 0.6)
                self.until(lambda until_s=until_s: self.now_s >= until_s)  # type: ignore[misc]
                self._fault()
                self._staff()
            self.calm()
            self.until(self._published)
            self.drain()
        finally:
            self.end()

    def calm(self) -> None:
        """No more faults; whoever was frozen comes back."""
        self.faults = self.log.away = False
        self.store.fail_next(0)
        for process in self.living():
            process.frozen_until_s = 0.0
        self._staff()

    def drain(self) -> None:
        """Tell everybody to end, in the order of the stream."""
        for role in ("rollout", "dispatch"):
            self._end_role(role)
        self.until(self._processed)
        for role in ("process", "train"):
            self._end_role(role)

    def end(self) -> None:
        """Kill what is left, so that no thread stays."""
        for process in self.processes:
            process.kill()
            process.thread.join(10)

    def _end_role(self, role: str) -> None:
        self._stop_all(role)
        if not self._in_order(role):  # whoever was left had been superseded: a supervisor starts another one
            self.start(role, "w0" if role == "rollout" else role)
            until_s = self.now_s + 5.0
            self.until(lambda: self.now_s >= until_s)
            self._stop_all(role)
        assert self._in_order(role), f"no {role} ended in order"

    def _stop_all(self, role: str) -> None:
        for process in self.living(role):
            process.stop.request()
        self.until(lambda: not self.living(role))

    def _in_order(self, role: str) -> bool:
        return any(p.code == 0 for p in self.processes if p.role == role)

    def _published(self) -> bool:
        head, ledger = self.watcher.heads.head, self.watcher.ledger
        ended = ledger.ended(self.settings.policies[POLICY].train.stop_at)
        return bool(ended) and head is not None and head.name.version == ledger.steps_planned

    def _processed(self) -> bool:
        name = topic(RUN, POLICY, "trajectories")
        ends = {Place(name, partition): bounds.end for partition, bounds in self.log.bounds(name).items()}
        stored = self.log.committed(commit_group(RUN, POLICY, "process"), ends)
        return all(stored[place].offset >= end if place in stored else end == 0 for place, end in ends.items())

    def _fault(self) -> None:
        victim = self.rng.choice(self.living())
        what = self.rng.choice(("kill", "kill", "freeze", "freeze", "twin", "away", "store"))
        self.happened.append(f"{self.now_s:.2f} {what} {victim.role}")
        if what == "kill":
            victim.kill()
        elif what == "freeze":
            victim.frozen_until_s = self.now_s + self.rng.expovariate(1 / 3)
            if self.rng.random() < 0.7:
                self.start(victim.role, victim.name)
        elif what == "twin":
            self.start(victim.role, victim.name if victim.role != "rollout" else f"w{self.born}")
        elif what == "away":
            self.log.away, self._back_at_s = True, self.now_s + self.rng.random() * 2
        else:
            self.store.fail_next(1)

    def _staff(self) -> None:
        """A supervisor: each role has a process that is not frozen, sooner or later."""
        for role in ("train", "process", "dispatch", "rollout"):
            if not any(p.frozen_until_s <= self.now_s for p in self.living(role)):
                self.start(role, "w0" if role == "rollout" else role)


def install(patch: pytest.MonkeyPatch, sim: Simulation) -> None:
    """Put the simulation's time, hearts, weights and learner in the daemons' places."""

    def monotonic() -> float:
        sim.now_s += 1e-6  # so that a loop which never pauses is seen
        assert (process := current()) is None or sim.now_s - process.since_s < 1.0, "a loop spins without a pause"
        return sim.now_s

    def sleep(seconds: float) -> None:
        process = current()
        assert process is not None
        process.pause(seconds)

    def learner(daemon: Daemon) -> CountingLearner:
        process = current()
        assert process is not None
        return CountingLearner(daemon, sim.disk, sim.watcher.executes, process.pause)

    fake = SimpleNamespace(monotonic=monotonic, sleep=sleep)
    for module in (
        infra.ownership, infra.weights.announce, producers.dispatcher, producers.standby, producers.outbox, producers.inbox,
        producers.rollout_worker, trainers.trainer, trainers.own_ledger, trainers.samples_reader, consumers.partitions,
        consumers.assignment, consumers.sharing,
    ):  # fmt: skip
        patch.setattr(module, "time", fake)
    for module in (producers.dispatcher, producers.rollout_worker, trainers.trainer, consumers.processor):
        patch.setattr(module, "Heart", SimHeart)
    patch.setattr(producers.rollout_worker, "Follower", SimFollower)
    patch.setattr(producers.rollout_worker, "Tokenizer", Codec)
    patch.setattr(producers.rollout_worker, "Calls", InlineCalls)
    patch.setattr(trainers.trainer, "make_learner", learner)
    put = Outbox.put

    @functools.wraps(put)
    def noted(self: Outbox, topic: str, partition: int, value: bytes, key: bytes, name: str = "") -> None:
        if (process := current()) is not None:
            process.finished.append(value)
        put(self, topic, partition, value, key, name)

    patch.setattr(Outbox, "put", noted)
