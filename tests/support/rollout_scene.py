"""A session of a rollout worker on a log in memory, turn by turn, with the scripted engine and a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.memory_log import MemoryLog
from infra.settings import RolloutTable
from infra.weights.follower import FetchedWeights, Follower
from producers.engine import GenerationRequest
from producers.engines.scripted_engine import ScriptedEngine
from producers.inbox import find_inbox
from producers.rollout_worker import RolloutWorker
from schemas.records import Claim, Partial, Request, Sampling, Trajectory, Version
from support.loop import Clock, Codec, InlineCalls, StubHeart, append, make_daemon, make_log, make_settings, said
from support.samples import claim, request

_FIRST = Version(1, 0)


def install(patch: pytest.MonkeyPatch) -> Clock:
    """Put the clock, a tokenizer and calls that come back at once in their places."""
    clock = Clock()
    for module in ("rollout_worker", "outbox", "inbox"):
        patch.setattr(f"producers.{module}.time", clock)
    patch.setattr("producers.rollout_worker.Tokenizer", Codec)
    patch.setattr("producers.rollout_worker.Calls", InlineCalls)
    return clock


class Weights:
    """What the follower has ready."""

    error = ""

    def __init__(self) -> None:
        self.ready: FetchedWeights | None = None

    def take(self) -> FetchedWeights | None:
        taken, self.ready = self.ready, None
        return taken


class Scene:
    """A log and one session of a worker."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        log: MemoryLog | None = None,
        name: str = "w0",
        session: str = "s1",
        version: Version = _FIRST,
        **tables: Any,
    ) -> None:
        self.clock, self.folder, self.session = clock, folder, session
        settings = make_settings(folder, **tables)
        self.log: MemoryLog = log or make_log(settings, clock_ms=clock.ms)
        self.daemon: Daemon = make_daemon(self.log, settings, name=name)
        self.heart, self.weights = StubHeart(session), Weights()
        self.claim(1, "a")
        inbox = find_inbox(self.daemon, session)
        assert inbox is not None
        first = FetchedWeights(version, folder, "digest-0")
        self.worker = RolloutWorker(self.daemon, cast(Heart, self.heart), cast(Follower, self.weights), first, inbox)

    def claim(self, epoch: int, nonce: str) -> None:
        record: Claim = claim(role="dispatch", epoch=epoch, nonce=nonce)
        append(self.log, "control", record)
        append(self.log, "requests", record)

    def ask(self, index: int = 0, **changes: Any) -> Request:
        fields: dict[str, Any] = {
            "epoch": 1, "nonce": "a", "group": "g00000000", "group_size": 3, "index": index, "partition": 0, "payload": "",
            "session": self.session, "min_version": 0, "lifetime_ms": 6000, "sampling": Sampling(max_tokens=3), "seed": index,
        }  # fmt: skip
        record: Request = request(**fields | changes)
        append(self.log, "requests", record)
        return record

    def turns(self, count: int = 8) -> None:
        for _ in range(count):
            self.clock.now_s += 0.05
            self.worker.turn()

    def chunks(self) -> list[Partial]:
        return [record for record in said(self.log, "partials") if isinstance(record, Partial)]

    def published(self) -> list[Trajectory]:
        return [record for record in said(self.log, "trajectories") if isinstance(record, Trajectory)]


def long_engine(
    folder: Path, version: Version, table: RolloutTable, *, vocab_size: int = 4, step_s: float = 0.0
) -> ScriptedEngine:
    """The token at position p of a sequence is p mod 2, wherever the prompt ends; an answer never ends by itself."""

    def answer(asked: GenerationRequest) -> list[int]:
        return [(len(asked.prompt) + at) % 2 for at in range(asked.sampling.max_tokens)]

    return ScriptedEngine(
        version, answer=answer, stop_ids=(), vocab_size=vocab_size, max_model_len=table.max_model_len, step_s=step_s
    )
