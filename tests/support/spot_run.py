"""Runs whose workers are processes that come and go: real daemons on a real broker and a real object store.

Of each run, trainer, processor and dispatcher are threads of one process; every worker is a process of its own, killed
with SIGKILL at the times that `Fleet.tend` finds due, and another one started at once in its place.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

import producers.rollout_worker
from infra import provision, wiring
from infra.audit import audit
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Log, Place
from infra.ownership import read_all, read_record
from infra.settings import Settings
from producers.groups import group_number
from schemas.names import control_topic, topic
from schemas.records import Heartbeat, Outcome, Partial, Request, State, Status, Trajectory
from support.paced import paced_parts
from support.paced_run import POLICY, Load, drop_lines, roles

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("infra.kafka_log", "infra.s3_store")
"""Imported late by daemons; imported early here, so that a worker is ready as soon as it is started."""


def work(settings: Settings, name: str) -> None:
    """A worker's process."""
    structlog.configure(processors=[drop_lines])
    with paced_parts(0.0), connected(settings, name) as daemon:
        producers.rollout_worker.run(daemon)


def conduct(settings: Settings, load: Load) -> None:
    """The process of all other roles; it ends when one of them does."""
    structlog.configure(processors=[drop_lines])
    with paced_parts(load.step_s), ExitStack() as stack:
        threads = []
        for role, name, body in roles(0):
            daemon = stack.enter_context(connected(settings, name))
            threads.append(threading.Thread(target=_told, args=(body, daemon), name=role, daemon=True))
        for thread in threads:
            thread.start()
        while all(thread.is_alive() for thread in threads):
            time.sleep(0.1)


@contextmanager
def connected(settings: Settings, name: str) -> Iterator[Daemon]:
    """A daemon of the run."""
    log = wiring.open_log(settings, client_id=name)
    try:
        yield Daemon(settings, POLICY, name, "", log, wiring.open_store(settings), Stop())
    finally:
        log.close()


def _told(body: Any, daemon: Daemon) -> None:
    try:
        body(daemon)
    except BaseException:  # noqa: BLE001  # the process ends with it
        traceback.print_exc()


@dataclass(slots=True)
class Hired:
    """A worker's process, when it was started and when it was killed."""

    name: str
    process: BaseProcess
    hired_s: float
    died_s: float | None = None


@dataclass(slots=True)
class Fleet:
    """One run's processes. `kill_every_s` 0 never kills; else the first kills come so long after `begin`."""

    load: Load
    settings: Settings
    kill_every_s: float
    log: Log
    workers: list[Hired] = field(default_factory=list)
    conductor: BaseProcess | None = None
    num_killed: int = 0
    _next_kill_s: float = math.inf
    _rng: random.Random = field(default_factory=lambda: random.Random(19))

    @classmethod
    def start(cls, run: str, load: Load, kill_every_s: float, **servers: Mapping[str, Any]) -> Fleet:
        """Make the topics and start every process."""
        settings = load.settings(Path(tempfile.mkdtemp(prefix="offsetrl-spot-")), run, **servers)
        log = wiring.open_log(settings, client_id="bench")
        provision.ensure(log, settings)
        fleet = cls(load, settings, kill_every_s, log)
        fleet.conductor = _process(conduct, settings, load)
        for _ in range(load.workers):
            fleet._hire()
        return fleet

    @property
    def has_begun(self) -> bool:
        """Whether a trajectory stands on the log."""
        name = topic(self.settings.run.name, POLICY, "trajectories")
        return any(bounds.end for bounds in self.log.bounds(name).values())

    def begin(self) -> None:
        """From now on workers are killed."""
        self._next_kill_s = time.time() + self.kill_every_s if self.kill_every_s else math.inf

    def tend(self) -> None:
        """Kill half of the workers when it is time, and start as many others."""
        assert self.conductor is not None and self.conductor.is_alive(), "trainer, processor or dispatcher ended"
        living = [worker for worker in self.workers if worker.died_s is None]
        for worker in living:
            assert worker.process.is_alive(), f"a worker ended by itself with {worker.process.exitcode}"
        if time.time() < self._next_kill_s:
            return
        self._next_kill_s += self.kill_every_s
        for worker in self._rng.sample(living, len(living) // 2):
            _kill(worker)
            self.num_killed += 1
            self._hire()

    def spare(self) -> None:
        """Kill no more."""
        self._next_kill_s = math.inf

    def close(self) -> None:
        """End every process."""
        for worker in self.workers:
            if worker.died_s is None:
                _kill(worker)
        if self.conductor is not None:
            self.conductor.kill()
            self.conductor.join()
        self.log.close()
        shutil.rmtree(self.settings.run.folder, ignore_errors=True)

    def alive_s(self, start_s: float, end_s: float) -> float:
        """Slot-seconds of living workers within a stretch of time; a worker lives from its first sign of serving on."""
        born_s = self._born_s()
        slots = self.load.slots // self.load.workers
        return slots * sum(
            max(0.0, min(end_s, worker.died_s or end_s) - max(start_s, born_s[worker.name]))
            for worker in self.workers
            if worker.name in born_s
        )

    def start_s(self) -> float:
        """Mean time between the start of a worker's process and its first sign of serving."""
        born_s = self._born_s()
        return statistics.mean(born_s[w.name] - w.hired_s for w in self.workers if w.name in born_s)

    def _born_s(self) -> dict[str, float]:
        born_s: dict[str, float] = {}
        for time_ms, record in self._read(control_topic(self.settings.run.name)):
            if isinstance(record, Heartbeat) and record.role == "rollout" and record.state is State.SERVING:
                born_s.setdefault(record.name, time_ms / 1000)
        return born_s

    def useful_s(self, start_s: float, end_s: float) -> float:
        """Rollout-seconds within a stretch of time of the members published by now, each once.

        A rollout works up to its publication; what it took over from an earlier attempt was done before that one's last
        chunk.
        """
        chunks: dict[tuple[str, int], dict[int, float]] = {}
        for time_ms, record in self._records("partials"):
            if isinstance(record, Partial):
                chunks.setdefault((record.group, record.index), {})[record.attempt] = time_ms / 1000
        seen: set[tuple[str, int]] = set()
        found = 0.0
        for time_ms, record in self._records("trajectories"):
            if not isinstance(record, Trajectory) or record.status is not Status.OK:
                continue
            if (member := (record.group, record.index)) not in seen:
                seen.add(member)
                whole_s, done_s = self.load.pace.seconds(_number(record.group), record.index), time_ms / 1000
                taken_s = whole_s * record.resumed_tokens / self.load.num_tokens
                found += _overlap(done_s, whole_s - taken_s, start_s, end_s)
                earlier = [at_s for attempt, at_s in chunks.get(member, {}).items() if attempt < record.attempt]
                found += _overlap(max(earlier, default=done_s), taken_s, start_s, end_s)
        return found

    def missing(self, until_s: float) -> tuple[int, int]:
        """Of the members first asked for before `until_s`: those whose group was closed without them, and those of open
        groups."""
        asked = {
            record.group: record.group_size
            for time_ms, record in self._records("requests")
            if isinstance(record, Request) and time_ms / 1000 < until_s
        }
        outcomes = {r.group: len(r.members) for _, r in self._records("samples") if isinstance(r, Outcome)}
        lost = sum(size - outcomes[group] for group, size in asked.items() if group in outcomes)
        return lost, sum(size for group, size in asked.items() if group not in outcomes)

    def unaccounted(self) -> int:
        """Trajectories that the audit cannot account for, or accounts for twice."""
        accounts = audit(self.log, self.settings.run.name, POLICY, max_tokens=self.settings.kafka.max_tokens).accounts
        return int(accounts.unaccounted + accounts.twice)

    def _hire(self) -> None:
        name = f"w{len(self.workers)}"
        self.workers.append(Hired(name, _process(work, self.settings, name), time.time()))

    def _records(self, kind: str) -> Iterator[tuple[int, Any]]:
        return self._read(topic(self.settings.run.name, POLICY, kind))

    def _read(self, name: str) -> Iterator[tuple[int, Any]]:
        for partition, bounds in self.log.bounds(name).items():
            for envelope in read_all(self.log, Place(name, partition), bounds):
                yield envelope.time_ms, read_record(envelope)


def _process(target: Any, *arguments: Any) -> BaseProcess:
    _CONTEXT.set_forkserver_preload([__name__, *_PRELOADED])
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    # Before Python 3.12 the process that forks them preloads without our sys.path, and says nothing when that fails.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        process.start()
    return process


def _kill(worker: Hired) -> None:
    worker.process.kill()
    worker.process.join()
    worker.died_s = time.time()


def _overlap(until_s: float, length_s: float, start_s: float, end_s: float) -> float:
    """How much of the `length_s` seconds before `until_s` lies between start and end.

    >>> _overlap(12.0, 5.0, 10.0, 20.0), _overlap(9.0, 5.0, 10.0, 20.0)
    (2.0, 0.0)
    """
    return max(0.0, min(until_s, end_s) - max(until_s - length_s, start_s))


def _number(group: str) -> int:
    number = group_number(group)
    assert number is not None, group
    return number


def preload() -> None:
    """Start the process that the others are forked from."""
    sys.stdout.flush()
    process = _process(os.getpid)
    process.join()
