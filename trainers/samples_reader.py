"""Reads `samples` into the backlog, from where the checkpoint says, as far as it is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from infra.daemon import Daemon
from infra.log import Place, Reader
from infra.ownership import read_record
from schemas.errors import DeadlineExceeded
from schemas.names import topic
from schemas.records import Outcome, Plan
from trainers.backlog import Backlog, SamplesPosition

GATHER_S = 300.0
TO_THE_END_S = 30.0


class SamplesReader:
    """The outcomes of one policy as they arrive; `backlog` holds what is not trained on yet."""

    def __init__(self, daemon: Daemon, trained: Callable[[int, int], bool]) -> None:
        """`trained(partition, closing offset)`: whether the weights have been through that outcome already."""
        self._daemon, self._trained = daemon, trained
        self._run_name, self._policy = daemon.settings.run.name, daemon.policy
        self.topic = topic(self._run_name, self._policy, "samples")
        self.backlog = Backlog(self._run_name, self._policy, {})
        self._reader: Reader | None = None

    def open(self, positions: Mapping[int, SamplesPosition]) -> None:
        """Begin at these positions; at a partition's start where there is none."""
        bounds = self._daemon.log.bounds(self.topic)
        known = {p: positions.get(p, SamplesPosition(b.start, -1)) for p, b in bounds.items()}
        self.backlog = Backlog(self._run_name, self._policy, known)
        self._reader = self._daemon.log.reader({Place(self.topic, p): at.offset for p, at in known.items()})

    def close(self) -> None:
        """Let go of the connection."""
        if self._reader is not None:
            self._reader.close()

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._reader is not None

    def read(self, timeout_s: float) -> int:
        """Take in what has come; how many records that were. Raises LogGap: a plan may name what is gone."""
        assert self._reader is not None
        envelopes = self._reader.poll(timeout_s)
        for envelope in envelopes:
            record = read_record(envelope)
            if not isinstance(record, Outcome):
                self.backlog.skip(envelope.partition, envelope.offset)
                continue
            self.backlog.take(envelope.partition, envelope.offset, envelope.time_ms, record)
            if self._trained(envelope.partition, record.closing_offset):
                self.backlog.done([(envelope.partition, record.closing_offset)])
        return len(envelopes)

    def gather(self, plan: Plan) -> list[Outcome]:
        """The outcomes of a plan, in its order; a plan of an earlier owner may name some that are not read yet."""
        deadline = time.monotonic() + GATHER_S
        while missing := [a for a in plan.samples if self.backlog.get(a) is None]:
            if time.monotonic() > deadline or self._daemon.stop.requested:
                raise DeadlineExceeded(
                    f"plan of step {plan.step} names {len(missing)} outcomes that were not found in time (limit {GATHER_S:g} s), "
                    f"the first at {self.topic}[{missing[0].partition}] offset {missing[0].offset}"
                )
            self.read(0.2)
        return [outcome for a in plan.samples if (outcome := self.backlog.get(a)) is not None]

    def read_to_the_end(self) -> None:
        """Read up to the present end of every partition. Raises DeadlineExceeded."""
        assert self._reader is not None
        bounds = self._daemon.log.bounds(self.topic)
        deadline = time.monotonic() + TO_THE_END_S
        while any(self._reader.position(Place(self.topic, p)) < b.end for p, b in bounds.items()):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"reading {self.topic} to its end took longer than {TO_THE_END_S:g} s")
            self.read(0.1)
