"""A dispatcher on a log in memory that a test moves turn by turn: its workers, its answers, its clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from infra.heartbeat import Heart
from infra.memory_log import MemoryLog
from producers.dispatcher import Dispatcher
from schemas.records import Close, Heartbeat, Outcome, Request, State, Trajectory
from support.loop import Clock, StubHeart, append, make_daemon, make_log, make_settings, said
from support.samples import announcement, heartbeat, outcome, trajectory


class Scene:
    """A log, a clock, and a dispatcher over them."""

    def __init__(self, folder: Path, clock: Clock, **tables: Mapping[str, Any]) -> None:
        self.clock, self.settings = clock, make_settings(folder, **tables)
        self.log: MemoryLog = make_log(self.settings, clock_ms=clock.ms)
        self.heart = StubHeart()
        self.dispatcher = self.start()

    def start(self) -> Dispatcher:
        daemon = make_daemon(self.log, self.settings)
        found = Dispatcher(daemon, cast(Heart, self.heart))
        found.claim()
        return found

    def ready(self) -> None:
        """Version 0 is there, and a worker."""
        append(self.log, "weights", announcement(version=0))
        self.worker("s1")

    def worker(self, session: str, state: State = State.SERVING, inbox: int = 0, **changes: Any) -> None:
        append(self.log, "control", self.beat(session, state, inbox, **changes))

    def beat(self, session: str, state: State = State.SERVING, inbox: int = 0, **changes: Any) -> Heartbeat:
        fields = {"name": f"w-{session}", "session": session, "state": state, "inbox": inbox, "capacity": 20, **changes}
        return heartbeat(**fields)

    def restart(self) -> None:
        """The process is gone, and another one comes."""
        self.dispatcher.close()
        self.dispatcher = self.start()

    def turn(self, seconds: float = 0.1) -> None:
        self.clock.now_s += seconds
        self.dispatcher._catch_up()  # one poll of a reader gives one partition only
        self.dispatcher.turn()

    def asked(self) -> list[Request]:
        return [record for record in said(self.log, "requests") if isinstance(record, Request)]

    def closes(self) -> list[Close]:
        return [record for record in said(self.log, "trajectories") if isinstance(record, Close)]

    def answer(self, request: Request, **changes: Any) -> None:
        record: Trajectory = trajectory(
            group=request.group, group_size=request.group_size, index=request.index, attempt=request.attempt,
            partition=request.partition, lifetime_ms=request.lifetime_ms,
            first_request_time_ms=request.first_request_time_ms or self.clock.ms(), **changes,
        )  # fmt: skip
        append(self.log, "trajectories", record, partition=request.partition)

    def end(self, group: str, closing: int, *, kept: bool = True) -> None:
        record: Outcome = outcome(group=group, partition=int(group[1:]) % 2, closing_offset=closing, previous=-1)
        append(
            self.log,
            "samples",
            record if kept else replace(record, disposition="zero-spread"),
            partition=record.partition,
        )
