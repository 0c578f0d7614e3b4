"""The chaos test's own processes: a producer with a journal, and processors that may carry a planted bug.

A bug is planted in a processor by `OFFSETRL_PLANT=<one of BUGS>`; nothing of it is in the product.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import consumers.assignment
import infra.kafka_log  # noqa: F401  # imported once by the fork server, so that children start at once
from consumers.assignment import Assigned
from consumers.partitions import Partitions
from consumers.processor import run
from infra import wiring
from infra.daemon import Daemon
from infra.lifecycle import Stop, die_with_parent
from infra.log import Ack, Bounds, Committed, Log, Pending, Place, Reader, Writer
from infra.memory_store import MemoryStore
from infra.planted import VARIABLE, planted
from infra.settings import Settings
from schemas.errors import BrokerError, DeadlineExceeded, SendFailed
from schemas.names import topic
from schemas.records import Close
from schemas.rules.closing import Recent
from support.chaos_plan import Item

ROUND = 25
FAILURES = 3


def produce(settings: dict[str, Any], plan: list[Item], journal: str, allowed: Any, acked: Any) -> None:
    """Send the plan, as far as `allowed` says; the journal says "s" before a send and "a" after its acknowledgement."""
    die_with_parent()
    loaded = Settings.model_validate(settings)
    log = wiring.open_log(loaded, "chaos-producer")
    with Path(journal).open("a", buffering=1) as book:
        done = 0
        while done < len(plan):
            upto = min(done + ROUND, allowed.value, len(plan))
            if upto == done:
                time.sleep(0.005)
                continue
            todo = list(range(done, upto))
            while todo:
                todo = _send_round(log, loaded.run.name, plan, todo, book)
            done = acked.value = upto
    log.close()


def _send_round(log: Log, name: str, plan: list[Item], todo: list[int], book: Any) -> list[int]:
    """Send these; which are still to be sent. A record that failed may stand on the log all the same."""
    try:
        writer = log.writer()
    except BrokerError:
        time.sleep(0.2)
        return todo
    left = list(todo)
    try:
        pending = []
        for number in todo:
            item = plan[number]
            book.write(json.dumps(["s", number]) + "\n")
            value: Any = item.value
            pending.append(writer.send(topic(name, item.policy, "trajectories"), item.partition, value, key=item.key))
        for number, one in zip(todo, pending, strict=True):
            ack = one.result(20.0)
            book.write(json.dumps(["a", number, ack.partition, ack.offset]) + "\n")
            left.remove(number)
    except (SendFailed, DeadlineExceeded, BrokerError):
        pass
    writer.close()
    return left


def process(settings: dict[str, Any], policy: str, name: str, output: str, seed: int, plant: str, lossy: float) -> None:
    """A processor, as `offsetrl process` runs it, over a log that loses an answer or a record now and then."""
    die_with_parent()
    with Path(output).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ[VARIABLE] = plant
    for bug, put in BUGS.items():
        if plant and planted(bug):
            put()
    loaded = Settings.model_validate(settings)
    stop = Stop()
    stop.install()
    log = LossyLog(wiring.open_log(loaded, f"process-{name}"), random.Random(seed), lossy)
    sys.exit(run(Daemon(loaded, policy, name, "", log, MemoryStore(), stop)))


class LossyLog:
    """A log whose sends fail now and then: half of those records stand on the log, half do not.

    At most FAILURES times in a process's life, so that a sound processor always gets through soon.
    """

    def __init__(self, log: Log, rng: random.Random, share: float) -> None:
        self._log, self._rng, self._share = log, rng, share
        self._left = FAILURES

    def strikes(self) -> float | None:
        """None: the send goes well; else it fails, and below 0.5 the record is lost as well."""
        if self._left == 0 or self._rng.random() >= self._share:
            return None
        self._left -= 1
        return self._rng.random()

    def writer(self) -> Writer:
        return _LossyWriter(self._log.writer(), self.strikes)

    def reader(self, positions: Mapping[Place, int]) -> Reader:
        return self._log.reader(positions)

    def bounds(self, name: str) -> dict[int, Bounds]:
        return self._log.bounds(name)

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        self._log.commit(group, positions)

    def committed(self, group: str, places: Iterable[Place]) -> dict[Place, Committed]:
        return self._log.committed(group, places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class _LossyWriter:
    """After a send that failed everything behind it fails as well, as with a real writer."""

    def __init__(self, writer: Writer, strikes: Callable[[], float | None]) -> None:
        self._writer, self._strikes, self._failed = writer, strikes, False

    def send(self, name: str, partition: int, value: bytes, key: bytes | None = None, headers: Any = ()) -> Pending:
        if name.endswith(".control"):
            return self._writer.send(name, partition, value, key, headers)
        strike = None if self._failed else self._strikes()
        self._failed = self._failed or strike is not None
        if self._failed and (strike is None or strike < 0.5):
            return _Failed()
        pending = self._writer.send(name, partition, value, key, headers)
        return pending if strike is None else _Failed()

    def flush(self, timeout_s: float) -> None:
        self._writer.flush(timeout_s)

    def close(self) -> None:
        self._writer.close()


class _Failed:
    def done(self) -> bool:
        return True

    def result(self, timeout_s: float) -> Ack:
        raise SendFailed("not acknowledged, on request of the test")


# Bugs ---------------------------------------------------------------------------------------------------------------


def _futures_not_awaited() -> None:
    def settle(self: Partitions) -> None:
        for sent in self._sent:
            if sent.due is not None:
                self._assigned[sent.partition].state.acknowledged(sent.due, 0)
        self._sent.clear()

    Partitions._settle = settle  # type: ignore[method-assign]


def _producer_kept_after_an_error() -> None:
    def discard(self: Partitions) -> None:
        self._sent.clear()

    Partitions.discard = discard  # type: ignore[method-assign]


def _offsets_before_outputs() -> None:
    settle = Partitions._settle

    def commit_first(self: Partitions) -> None:
        for assigned in self._assigned.values():
            state = assigned.state
            in_flight, state._in_flight = state._in_flight, 0
            if (found := assigned.committable()) is not None:
                self._log.commit(self._group, {Place(self._source, _number(self, assigned)): found})
            state._in_flight = in_flight
        settle(self)

    Partitions._settle = commit_first  # type: ignore[method-assign]


def _number(partitions: Partitions, assigned: Assigned) -> int:
    return next(p for p, found in partitions._assigned.items() if found is assigned)


def _reset_to_latest() -> None:
    position = consumers.assignment._position

    def latest(place: Place, bounds: Bounds, stored: Committed | None, gaps: list[Any]) -> int:
        return position(place, bounds, stored, gaps) if stored else bounds.end

    consumers.assignment._position = latest


def _commit_past_an_open_group() -> None:
    committable = Assigned.committable

    def all_polled(self: Assigned) -> Committed | None:
        found = committable(self)
        return None if found is None else Committed(self.state.position, found.note)

    Assigned.committable = all_polled  # type: ignore[method-assign]


def _no_read_back() -> None:
    consumers.assignment._read_back = lambda *args: None


def _note_read_at_commit_time() -> None:
    """The note of where to read outcomes back from is asked for at the commit, not taken with what was handled."""
    commit, committable = Partitions.commit, Assigned.committable

    def commit_late(self: Partitions) -> None:
        ends = self._log.bounds(self._samples)

        def ends_now(assigned: Assigned) -> Committed | None:
            found = committable(assigned)
            if found is None:
                return None
            note = {**json.loads(found.note), "samples": ends[_number(self, assigned)].end}
            return Committed(found.offset, json.dumps(note))

        Assigned.committable = ends_now  # type: ignore[method-assign, assignment]  # it is called with self alone
        try:
            commit(self)
        finally:
            Assigned.committable = committable  # type: ignore[method-assign]

    Partitions.commit = commit_late  # type: ignore[method-assign]


def _ghost_close() -> None:
    read = Partitions._read

    def remember(self: Partitions, envelope: Any) -> Any:
        record = read(self, envelope)
        if isinstance(record, Close):
            state = self._assigned[envelope.partition].state
            closer = state._closer
            if closer is not None and record.group not in closer._open and record.group not in closer._recent:
                closer._remember(Recent(record.group, envelope.time_ms, 3_600_000, frozenset()))
        return record

    Partitions._read = remember  # type: ignore[method-assign]


BUGS: Mapping[str, Callable[[], None]] = {
    "futures-not-awaited": _futures_not_awaited,
    "producer-kept-after-an-error": _producer_kept_after_an_error,
    "offsets-before-outputs": _offsets_before_outputs,
    "reset-to-latest": _reset_to_latest,
    "commit-past-an-open-group": _commit_past_an_open_group,
    "no-read-back": _no_read_back,
    "note-read-at-commit-time": _note_read_at_commit_time,
    "ghost-close": _ghost_close,
}
"""By name; `chain-not-checked` is the checker's own."""
