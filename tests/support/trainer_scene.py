"""A trainer's surroundings that outlive it: a log, a store and a disk, and outcomes that arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from infra.memory_log import MemoryLog, wall_clock_ms
from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.weights.announce import Heads, read_heads
from schemas.records import Announcement, VersionRun
from support.loop import append, make_log, make_settings, said
from support.outcomes import make_outcome
from support.points import start_trainer
from support.samples import COLUMNS
from support.simulation import Disk
from trainers.trainer import Trainer

TOKENS = 6


class Scene:
    """A log, a store and a disk that outlive trainers."""

    def __init__(self, folder: Path, clock_ms: Callable[[], int] = wall_clock_ms, **train: Any) -> None:
        self.settings: Settings = make_settings(
            folder, train={"batch_groups": 2, "max_staleness": 2, "checkpoint_every": 2, **train}
        )
        self.log: MemoryLog = make_log(self.settings, clock_ms=clock_ms)
        self.store, self.disk = MemoryStore(), cast(Disk, [])
        self.executed: list[int] = []
        self._last = {0: -1, 1: -1}

    def start(self, hook: Callable[[str], None] = lambda name: None) -> Trainer:
        """A trainer that has not taken over yet."""
        return start_trainer(self.log, self.store, self.settings, hook)

    def outcomes(self, count: int, *, partition: int = 0, version: tuple[int, int] = (1, 0), **changes: Any) -> None:
        """Kept outcomes at the end of a partition, of TOKENS trainable tokens each."""
        columns = {**COLUMNS, "versions": (VersionRun(*version, 3),)}
        for _ in range(count):
            previous = self._last[partition]
            self._last[partition] = closing = previous + 3
            record = make_outcome(
                group=f"g{partition}-{closing}", closing_offset=closing, previous=previous, partition=partition,
                version=version, members=((0, closing - 1), (1, closing)), **changes,
            )  # fmt: skip
            members = tuple(replace(member, num_tokens=7, num_sampled=3, **columns) for member in record.members)
            append(self.log, "samples", replace(record, members=members), partition=partition)

    def heads(self) -> Heads:
        """The newest announcement that counts."""
        return read_heads(self.log, "demo", "main", timeout_s=5.0)

    def versions(self) -> list[tuple[int, int]]:
        """(epoch, version) of every announcement."""
        return [(r.epoch, r.version) for r in said(self.log, "weights") if isinstance(r, Announcement)]
