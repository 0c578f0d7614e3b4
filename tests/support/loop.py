"""A small run's settings, its log in memory, and stand-ins for what its daemons need: codec, engine, heart, clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Log, Place
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.ownership import read_all, read_record
from infra.provision import topic_specs
from infra.settings import RolloutTable, Settings
from producers.engine import Generation
from producers.engines.scripted_engine import ScriptedEngine
from schemas.codec import encode
from schemas.names import control_topic, topic
from schemas.records import Record, State, Version

ALPHABET = "01>"
EOS = len(ALPHABET)
RUN, POLICY = "demo", "main"
EPOCH_MS = 1_790_000_000_000


def make_settings(folder: Path, **tables: Mapping[str, Any]) -> Settings:
    """Settings of a small, quick run; `tables` changes those of the policy."""
    policy: dict[str, dict[str, Any]] = {
        "task": {"environment": "sort-digits", "settings": {"digits": 2, "alphabet": "01"}},
        "sampling": {"max_tokens": 3},
        "dispatch": {
            "group_size": 3, "capacity_groups": 5, "lifetime_s": 6.0, "reissue_after_s": 2.0, "heartbeat_timeout_s": 1.5,
        },
        "rollout": {"engine": "support.loop:make_engine", "concurrency": 6, "heartbeat_s": 0.3, "max_model_len": 16},
        "process": {"commit_every_s": 0.2},
        "train": {"batch_groups": 2, "max_staleness": 1, "steps": 10, "checkpoint_every": 2},
    }  # fmt: skip
    for name, changes in tables.items():
        policy[name] = {**policy.get(name, {}), **changes}
    run = {"name": RUN, "seed": 5, "partitions": 2, "inboxes": 3, "folder": str(folder)}
    return Settings.model_validate({"run": run, "policies": {POLICY: {"model": str(folder), **policy}}})


def make_daemon(
    log: Log, settings: Settings, *, name: str = "one", store: Any = None, stop: Stop | None = None
) -> Daemon:
    """A daemon over these parts."""
    return Daemon(settings, POLICY, name, "", log, store or MemoryStore(), stop or Stop())


def make_log(settings: Settings, **knobs: Any) -> MemoryLog:
    """A log in memory with the run's topics."""
    log = MemoryLog(**knobs)
    log.create(topic_specs(settings))
    return log


class StubHeart:
    """Keeps its beats."""

    def __init__(self, session: str = "s1") -> None:
        self.session = session
        self.beats: list[tuple[State, dict[str, Any]]] = []

    def beat(self, state: State = State.SERVING, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        self.beats.append((state, {**(metrics or {}), **fields}))

    def close(self) -> None:
        self.beat(State.LEFT)


class Clock:
    """Seconds that a test moves: a log's append times, and `time` for a module."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def ms(self) -> int:
        return EPOCH_MS + int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def append(log: MemoryLog, kind: str, *written: Record, partition: int = 0, key: bytes | None = b"k") -> None:
    """Records onto a topic of the run ("control" too)."""
    name = control_topic(RUN) if kind == "control" else topic(RUN, POLICY, kind)
    writer = log.writer()
    for record in written:
        writer.send(name, partition, encode(record), key)
    writer.flush(5.0)
    writer.close()


def said(log: MemoryLog, kind: str) -> list[Record]:
    """Every record of a topic of the run, decoded, partition by partition."""
    name = control_topic(RUN) if kind == "control" else topic(RUN, POLICY, kind)
    return [
        record
        for partition, bounds in log.bounds(name).items()
        for envelope in read_all(log, Place(name, partition), bounds)
        if (record := read_record(envelope)) is not None
    ]


class Codec:
    """One id per character."""

    digest = "ab" * 32

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        return [ALPHABET.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens if token < EOS)


class InlineCalls:
    """Calls into environments that come back at once, in the caller's thread; those of the keys in `hung` never do."""

    def __init__(self) -> None:
        self.hung: set[str] = set()
        self.num_stuck = 0
        self._ready: list[tuple[str, Any]] = []
        self._hanging: set[str] = set()

    def start(self, key: str, job: Callable[[], Coroutine[Any, Any, Any]], *, on_loop: bool = False) -> None:
        if key in self.hung:
            self._hanging.add(key)
            return
        try:
            job().send(None)
        except StopIteration as stop:
            self._ready.append((key, stop.value))
        except Exception as error:  # noqa: BLE001  # as the real one
            self._ready.append((key, error))

    def finished(self) -> list[tuple[str, Any]]:
        found, self._ready = self._ready, []
        return found

    def give_up(self, key: str) -> None:
        if key in self._hanging:
            self._hanging.remove(key)
            self.num_stuck += 1

    def wait(self, timeout_s: float) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


LOCAL = threading.local()


def current() -> Any:
    """The simulated process whose thread this is, if any (support.simulation)."""
    return getattr(LOCAL, "process", None)


class PausingEngine(ScriptedEngine):
    """Each step is a point where others may go on."""

    def step(self) -> list[Generation]:
        if (process := current()) is not None:
            process.pause(0.03)
        return super().step()


def make_engine(folder: Path, version: Version, table: RolloutTable) -> ScriptedEngine:
    """Answers by the seeded rule."""
    return PausingEngine(
        version, vocab_size=EOS + 1, stop_ids=(EOS,), max_model_len=table.max_model_len, max_running=table.concurrency
    )
