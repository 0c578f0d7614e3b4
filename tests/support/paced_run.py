"""A whole run of paced rollouts: every daemon the product's own, each in a thread of one process, on a log in memory.

`side_by_side` gives each run a process of its own and lets all of them work during the same seconds. What a run did is
read from its log afterwards (`Ran`).
"""

from __future__ import annotations

import dataclasses
import heapq
import multiprocessing
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

import consumers.processor
import producers.dispatcher
import producers.rollout_worker
import trainers.trainer
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Log, Place
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.ownership import read_all, read_record
from infra.provision import topic_specs
from infra.settings import Settings
from producers.groups import group_number
from schemas.names import topic
from schemas.records import Outcome, Result
from schemas.rules.ledger import Ledger
from schemas.rules.planning import STALE
from support.paced import Pace, paced_parts

RUN, POLICY = "paced", "main"
Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A workload: slots (R) over workers, batches of groups, durations, staleness."""

    slots: int = 128
    workers: int = 2
    group_size: int = 8
    batch_groups: int = 64
    max_staleness: int = 4
    mean_s: float = 0.5
    """Of a rollout."""
    tail: float = 1.0
    """p99 / median of a rollout."""
    step_s: float = 2.0
    """Of a training step."""
    run_s: float = 30.0
    warm_s: float = 0.0
    """From the start; steps that end in it do not count."""
    seed: int = 0
    num_tokens: int = 8
    """Sampled tokens of a rollout, spread evenly over its time."""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes to the settings' tables."""

    @property
    def batch(self) -> int:
        """Trajectories of a step (N)."""
        return self.batch_groups * self.group_size

    def with_(self, **changes: Any) -> Load:
        """The same with some fields changed; without staleness the settings ask for no correction."""
        if changes.get("max_staleness") == 0:
            changes["tables"] = {**self.tables, "train": {**self.tables.get("train", {}), "correction": "none"}}
        return dataclasses.replace(self, **changes)

    def settings(self, folder: Path, run: str = RUN, **others: Mapping[str, Any]) -> Settings:
        """The settings of a run; `others`: whole tables beside those of run and policy."""
        engine = {"pace": dataclasses.asdict(self.pace), "num_tokens": self.num_tokens}
        policy: dict[str, dict[str, Any]] = {
            "task": {"environment": "support.paced:make_environment"},
            "sampling": {"max_tokens": self.num_tokens},
            "dispatch": {"group_size": self.group_size, "capacity_groups": 100_000},
            "rollout": {
                "engine": "support.paced:make_engine", "engine_settings": engine, "max_model_len": 1024,
                "concurrency": self.slots // self.workers,
            },
            "process": {"group_filters": []},
            "train": {"batch_groups": self.batch_groups, "max_staleness": self.max_staleness},
        }  # fmt: skip
        for name, changes in self.tables.items():
            policy[name] = {**policy[name], **changes}
        own = {"name": run, "seed": self.seed, "partitions": 2, "inboxes": self.workers, "folder": str(folder)}
        return Settings.model_validate({"run": own, "policies": {POLICY: {"model": str(folder), **policy}}, **others})

    @property
    def pace(self) -> Pace:
        """How long rollouts take."""
        return Pace(self.mean_s, self.tail, self.batch, self.group_size, self.seed)

    def durations(self, group: int) -> list[float]:
        """Seconds of each member's rollout."""
        return [self.pace.seconds(group, index) for index in range(self.group_size)]

    def makespan_s(self, groups: Sequence[int]) -> float:
        """What these groups take alone, in their order, the next rollout always on the first slot that is free.

        >>> Load(slots=2, group_size=3, mean_s=1.0).makespan_s([0])
        2.0
        """
        free_at = [0.0] * self.slots
        for group in groups:
            for duration_s in self.durations(group):
                heapq.heappush(free_at, heapq.heappop(free_at) + duration_s)
        return max(free_at)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run did, from its log."""

    done_s: tuple[float, ...]
    """When each step was done, seconds after the start; index = step."""
    groups: tuple[tuple[int, ...], ...]
    """Numbers of the groups that each step ate."""
    ages: tuple[int, ...]
    """Of each step: its number minus the least version among its samples' tokens, reckoned from the outcomes."""
    kept: int
    """Outcomes that were kept."""
    stale: int
    """Those of them that a plan set aside because of their age."""
    statuses: Counter[str]
    """Members of all outcomes by status."""
    warm_s: float
    cpu_s: float
    """Processor time of the whole run."""

    @property
    def counted(self) -> list[int]:
        """Steps that were done once warm, without the first: its beginning is not known."""
        return [step for step, at_s in enumerate(self.done_s) if at_s >= self.warm_s][1:]

    @property
    def steps_per_s(self) -> float:
        """Over the counted steps."""
        counted = self.counted
        assert counted, f"only {len(self.done_s)} steps were done: {self.done_s}"
        return len(counted) / (self.done_s[counted[-1]] - self.done_s[counted[0] - 1])


def side_by_side(loads: Mapping[Key, Load]) -> dict[Key, Ran]:
    """Run all of them at the same time, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    with (
        tempfile.TemporaryDirectory(prefix="offsetrl-paced-", ignore_cleanup_errors=True) as root,
        ProcessPoolExecutor(len(loads), mp_context=context, max_tasks_per_child=1) as pool,
    ):
        named = enumerate(loads.items())
        futures = {name: pool.submit(drive, load, Path(root) / str(number)) for number, (name, load) in named}
        return {name: future.result() for name, future in futures.items()}


def drive(load: Load, folder: Path) -> Ran:
    """Run the daemons for `run_s` seconds; they are left running, so this process should end soon after."""
    structlog.configure(processors=[drop_lines])
    settings, log, store = load.settings(folder), MemoryLog(), MemoryStore()
    started_ms = log.clock_ms()
    log.create(topic_specs(settings))
    failures: list[str] = []
    with paced_parts(load.step_s):
        for role, name, body in roles(load.workers):
            daemon = Daemon(settings, POLICY, name, "", log, store, Stop())
            threading.Thread(target=_guarded, args=(body, daemon, failures), name=role, daemon=True).start()
        deadline = time.monotonic() + load.run_s
        while time.monotonic() < deadline and not failures:
            time.sleep(0.05)
        assert not failures, failures[0]
        return look_back(log, started_ms, load.warm_s)


def roles(workers: int) -> Iterator[tuple[str, str, Callable[[Daemon], int]]]:
    """Role, name and body of each daemon."""
    yield "train", "train", trainers.trainer.run
    yield "process", "process", consumers.processor.run
    yield "dispatch", "dispatch", producers.dispatcher.run
    for number in range(workers):
        yield "rollout", f"w{number}", producers.rollout_worker.run


def _guarded(body: Callable[[Daemon], int], daemon: Daemon, failures: list[str]) -> None:
    try:
        body(daemon)
    except BaseException:  # noqa: BLE001  # raised by whoever drives
        failures.append(traceback.format_exc())


def look_back(log: Log, started_ms: int, warm_s: float) -> Ran:
    """Reckon from the log what a run did."""
    ledger, done_s = Ledger(), []
    steps = Place(topic(RUN, POLICY, "steps"), 0)
    for envelope in read_all(log, steps, log.bounds(steps.topic)[0]):
        record = read_record(envelope)
        if ledger.take(envelope.offset, record, envelope.time_ms) and isinstance(record, Result):
            done_s.append((envelope.time_ms - started_ms) / 1000)
    outcomes: dict[tuple[int, int], Outcome] = {}
    name = topic(RUN, POLICY, "samples")
    for partition, bounds in log.bounds(name).items():
        for envelope in read_all(log, Place(name, partition), bounds):
            if isinstance(record := read_record(envelope), Outcome):
                outcomes[partition, record.closing_offset] = record
    eaten = [[outcomes[a.partition, a.closing_offset] for a in plan.samples] for _, plan in ledger.plans]
    oldest = [min(run.version for o in step for m in o.members for run in m.versions) for step in eaten]
    return Ran(
        done_s=tuple(done_s),
        groups=tuple(tuple(_number(outcome.group) for outcome in step) for step in eaten),
        ages=tuple(plan.step - version for (_, plan), version in zip(ledger.plans, oldest, strict=True)),
        kept=sum(outcome.kept for outcome in outcomes.values()),
        stale=sum(drop.reason == STALE for drop in ledger.drops),
        statuses=Counter(member.status.value for outcome in outcomes.values() for member in outcome.members),
        warm_s=warm_s,
        cpu_s=time.process_time(),
    )


def _number(group: str) -> int:
    number = group_number(group)
    assert number is not None, group
    return number


def drop_lines(logger: Any, name: str, event: Any) -> Any:
    """A processor for structlog: no lines."""
    raise structlog.DropEvent
