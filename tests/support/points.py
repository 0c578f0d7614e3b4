"""A trainer over a log and a store in memory of which every write is a point with a name, where a test may step in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.lifecycle import Stop
from infra.log import Log, Pending, Place, Reader, Writer
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.ownership import read_all, read_record
from infra.settings import Settings
from schemas.codec import decode
from schemas.names import topic
from schemas.rules.ledger import Ledger
from support.loop import POLICY, RUN, StubHeart
from trainers.trainer import Trainer

Hook = Callable[[str], None]


class Crash(BaseException):
    """The process is gone."""


def crash_at(number: int) -> Hook:
    """End the process at its n-th point."""
    count = itertools.count()

    def hook(name: str) -> None:
        if next(count) == number:
            raise Crash(name)

    return hook


class PointLog:
    """A log whose sends call `hook` before and after, with the kind of record."""

    def __init__(self, log: MemoryLog, hook: Hook) -> None:
        self._log, self._hook = log, hook

    def writer(self) -> Writer:
        return _PointWriter(self._log.writer(), self._hook)

    def reader(self, positions: Mapping[Place, int]) -> Reader:
        return self._log.reader(positions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class _PointWriter:
    def __init__(self, writer: Writer, hook: Hook) -> None:
        self._writer, self._hook = writer, hook
        self.flush, self.close = writer.flush, writer.close

    def send(self, topic: str, partition: int, value: bytes, key: bytes | None = None, headers: Any = ()) -> Pending:
        name = f"{topic.rpartition('.')[2]} {type(decode(value)).__name__}"
        self._hook(f"before {name}")
        pending = self._writer.send(topic, partition, value, key, headers)
        self._hook(f"after {name}")
        return pending


class PointStore:
    """A store whose manifests call `hook` before and after (blobs are sent by other threads)."""

    def __init__(self, store: MemoryStore, hook: Hook) -> None:
        self._store, self._hook = store, hook

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        if "/manifests/" not in key:
            return self._store.put(key, data, if_absent=if_absent)
        self._hook("before manifest")
        done = self._store.put(key, data, if_absent=if_absent)
        self._hook("after manifest")
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def start_trainer(log: MemoryLog, store: MemoryStore, settings: Settings, hook: Hook) -> Trainer:
    """A trainer that has not taken over yet."""
    point_log, point_store = cast(Log, PointLog(log, hook)), cast(Any, PointStore(store, hook))
    daemon = Daemon(settings, "main", "train", "", point_log, point_store, Stop())
    return Trainer(daemon, cast(Heart, StubHeart()))


def train(trainer: Trainer, steps: int) -> None:
    """Take over, then turns until so many steps are done."""
    try:
        trainer.take_over()
        for _ in range(200):
            if trainer.ledger.steps_done >= steps:
                trainer.end()
                return
            trainer.turn()
        raise AssertionError(f"{trainer.ledger.steps_done} of {steps} steps after 200 turns")
    finally:
        trainer.close()


def ledger_of(log: MemoryLog) -> Ledger:
    """The ledger as the log alone says it."""
    ledger, place = Ledger(), Place(topic(RUN, POLICY, "steps"), 0)
    for envelope in read_all(log, place, log.bounds(place.topic)[0]):
        ledger.take(envelope.offset, read_record(envelope), envelope.time_ms)
    return ledger


def model_settings(settings: Settings, model: Path) -> Settings:
    """The same settings with this model."""
    table = settings.policies["main"].model_copy(update={"model": model})
    return settings.model_copy(update={"policies": {"main": table}})
