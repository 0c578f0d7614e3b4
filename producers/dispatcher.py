"""DAEMON `offsetrl dispatch`: asks for rollouts, in time and not too many, and closes what never completes.

| consumes | requests (its own, and other dispatchers' claims), trajectories, samples, steps, weights, control |
| produces | requests into workers' inboxes, close records on trajectories, claims |
| waits for | version 0 of the weights, before the first request; live workers |
| after a crash | reads these topics again, claims the inboxes with a higher epoch, asks for what was never asked for |

Of several dispatchers the newest claim wins; the others end with exit code 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.log import Envelope, Place
from infra.ownership import Ownership, catch_up, read_record, start_positions
from producers.asking import Asker
from producers.dispatch_state import DispatchState, Limits
from producers.groups import Group, Worker
from schemas.errors import BrokerError, DeadlineExceeded, LogGap, RecordError, SendFailed
from schemas.names import control_topic, topic
from schemas.records import (
    Announcement,
    Claim,
    Close,
    Heartbeat,
    Outcome,
    Record,
    Request,
    State,
    Trajectory,
)
from schemas.validate import check_trajectory

_CATCH_UP_S = 120.0
_END_S = 20.0
_BACKOFF_S = (0.5, 10.0)
_DISTURBED = (BrokerError, SendFailed, DeadlineExceeded, LogGap)
_LOG = structlog.get_logger("offsetrl.dispatch")


def run(daemon: Daemon) -> int:
    """Dispatch until told to stop; a disturbed log means a new claim and a new reading of it."""
    heart = Heart(daemon, "dispatch")
    dispatching = Dispatching(daemon, heart)
    try:
        while not daemon.stop.requested:
            daemon.stop.wait(dispatching.turn())
        dispatching.end()
    finally:
        dispatching.close()
        heart.close()
    return 0


class Dispatching:
    """Turns that survive a log that is away: after any error everything is thrown away and built again from the log."""

    def __init__(self, daemon: Daemon, heart: Heart) -> None:
        self._daemon, self._heart = daemon, heart
        self._dispatcher: Dispatcher | None = None
        self._failures = 0

    def turn(self) -> float:
        """One turn; how long to rest before the next one, in seconds. Raises Superseded."""
        try:
            if self._dispatcher is None:
                self._heart.beat(State.STARTING)
                self._dispatcher = Dispatcher(self._daemon, self._heart)
                self._dispatcher.claim()
            self._dispatcher.turn()
        except _DISTURBED as error:
            self.close()
            if not self._failures:
                _LOG.warning("disturbed; reading the log again", error=str(error))
            self._failures += 1
            return min(_BACKOFF_S[0] * 2.0 ** min(self._failures - 1, 10), _BACKOFF_S[1])
        if self._failures:
            _LOG.info("dispatching again", failures=self._failures)
        self._failures = 0
        return 0.0

    def end(self) -> None:
        """Close what is open if the run has ended. A failure is harmless: the next dispatcher does it."""
        try:
            if self._dispatcher is not None:
                self._dispatcher.end()
        except _DISTURBED as error:
            _LOG.warning("the end was disturbed; what is open waits for the next dispatcher", error=str(error))

    def close(self) -> None:
        """Let go of the connections."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._dispatcher = None


class Dispatcher:
    """One claim's worth of dispatching."""

    def __init__(self, daemon: Daemon, heart: Heart) -> None:
        self._daemon, self._heart = daemon, heart
        settings = daemon.settings
        self._run_name, self._policy = settings.run.name, daemon.policy
        names = {kind: topic(self._run_name, self._policy, kind) for kind in _READ}
        self._kinds = {name: kind for kind, name in names.items()}
        self._handlers: dict[str, Callable[[Envelope, Record], None]] = {
            "requests": self._requests,
            "trajectories": self._trajectories,
            "samples": self._samples,
            "steps": self._steps,
            "weights": self._weights,
            "control": self._control,
        }
        self._max_tokens = settings.kafka.max_tokens
        self.state = DispatchState(_limits(daemon), settings.run.partitions)
        inboxes = [Place(names["requests"], inbox) for inbox in range(settings.run.inboxes)]
        self._ownership = Ownership("dispatch", self._run_name, self._policy, inboxes)
        positions = start_positions(daemon.log, [*names.values(), control_topic(self._run_name)])
        self._places = list(positions)
        self._version = -1
        self._asker = Asker(daemon)
        try:
            self._reader = daemon.log.reader(positions)
        except BrokerError:
            self._asker.close_writer()
            raise

    def turn(self) -> None:
        """Read, then ask, ask again and close as the state says; every record written is read again before the next turn."""
        self._read(0.05)
        if self._close_strays() + self._ask_missing() + self._ask_overdue() + self._close_expired() + self._admit():
            self._settle()
        self._beat(State.SERVING)

    def close(self) -> None:
        """Let go of the connections."""
        self._reader.close()
        self._asker.close_writer()

    # Reading -------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Read everything, own every inbox, read up to there. Raises Superseded."""
        self._catch_up()  # control first: a claim whose inbox record retention removed still stands there
        claim = self._ownership.claim(self._daemon.log, self._reader, self._handle, _CATCH_UP_S)
        self._asker.owns(claim)
        self._catch_up()
        self.state.caught_up(time.monotonic())
        _LOG.info("claimed", epoch=claim.epoch, running=self.state.running, next_group=self.state.next_number)

    def _catch_up(self) -> None:
        catch_up(self._daemon.log, self._reader, self._places, self._handle, _CATCH_UP_S)

    def _read(self, timeout_s: float) -> None:
        for envelope in self._reader.poll(timeout_s):
            self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        record = read_record(envelope)
        self.state.saw_time(envelope.time_ms)
        if record is not None:
            handle = self._handlers[self._kinds.get(envelope.topic, "control")]
            handle(envelope, record)

    def _requests(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Claim):
            self._ownership.saw(envelope, record)
        elif isinstance(record, Request) and self._ownership.proves(envelope, record.epoch, record.nonce):
            self.state.saw_request(record, envelope.time_ms, time.monotonic())

    def _trajectories(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Trajectory) and self._valid(record, envelope):
            self.state.saw_trajectory(record, envelope.time_ms)
        elif isinstance(record, Close) and record.partition == envelope.partition:
            self.state.saw_close(record, envelope.time_ms)

    def _samples(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Outcome):
            self.state.saw_outcome(envelope.partition, record)

    def _steps(self, envelope: Envelope, record: Record) -> None:
        self.state.saw_step(envelope.offset, record)

    def _weights(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Announcement):
            self._version = max(self._version, record.version)

    def _control(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Heartbeat) and (record.role, record.policy) == ("rollout", self._policy):
            self._handle_worker(record, envelope.time_ms)
        elif isinstance(record, Claim) and (record.role, record.policy) == ("dispatch", self._policy):
            self._ownership.heard(record.epoch)

    def _handle_worker(self, beat: Heartbeat, time_ms: int) -> None:
        worker = Worker(beat.name, beat.session, beat.inbox, beat.capacity, time.monotonic(), time_ms)
        gone = beat.state in (State.LEFT, State.DRAINING) or not 0 <= beat.inbox < self._daemon.settings.run.inboxes
        self.state.saw_worker(worker, gone)

    def _valid(self, record: Trajectory, envelope: Envelope) -> bool:
        try:
            check_trajectory(
                record,
                run=self._run_name,
                policy=self._policy,
                partition=envelope.partition,
                max_tokens=self._max_tokens,
            )
        except RecordError:
            return False  # the processor will dead-letter it
        return True

    # Writing -------------------------------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Ask for new groups, as many as admission allows and workers take."""
        for lost in self.state.drop_silent(time.monotonic()):
            _LOG.warning("worker lost: its heartbeats stopped", worker=lost.name, session=lost.session)
        if self._version < 0:
            return 0
        sent = 0
        for _ in range(self.state.admissible()):
            size = self.state.limits.group_size
            worker = self.state.choose_worker(size)
            if worker is None:
                break
            group = Group(self.state.next_number, size, min_version=self.state.next_min_version())
            self.state.next_number += 1
            self.state.groups[group.name] = group
            sent += self._asker.ask(group, range(group.group_size), 0, worker)
        return sent

    def _ask_missing(self) -> int:
        """Members that a dispatcher which died between two writes never asked for."""
        return sum(
            self._asker.ask(group, missing, 0, worker)
            for group, missing in self.state.unasked()
            if (worker := self.state.choose_worker(len(missing)))
        )

    def _ask_overdue(self) -> int:
        """Members whose worker is gone or too slow: once more, elsewhere if possible."""
        sent = 0
        for group, index in self.state.overdue(time.monotonic()):
            if worker := self.state.choose_worker(1, avoid=group.asked[index].session):
                sent += self._asker.ask(group, [index], 1, worker)
        if sent:
            _LOG.info("asked once more", members=sent)
        return sent

    def _close_expired(self) -> int:
        expired = self.state.expired(time.monotonic())
        for group in expired:
            _LOG.warning("group closed: its lifetime is over", group=group.name)
            self._asker.close(group.name, self._asker.partition(group), "lifetime")
            group.closing = True
        return len(expired)

    def _close_strays(self) -> int:
        """Groups that a superseded dispatcher asked for: nobody completes them, so they end at once."""
        strays = self.state.open_strays()
        for name, stray in strays:
            _LOG.warning("group closed: no valid request for it is known", group=name)
            self._asker.close(name, stray.partition, "stray")
            stray.closing = True
        return len(strays)

    def _settle(self) -> None:
        """Wait for the acknowledgements and read our own requests: what was asked for is what stands on the log."""
        self._asker.flush()
        catch_up(self._daemon.log, self._reader, self._ownership.places, self._handle, _CATCH_UP_S)
        self.state.count_outstanding()

    def end(self) -> None:
        """A run whose steps are all planned closes what is open on the log; of any other a successor goes on with it.

        It stays, within a limit, while a live worker may still bring a member that would open a group again.
        """
        deadline = time.monotonic() + _END_S
        while self.state.ended:
            self._catch_up()
            self._close_strays()
            for group in self.state.open_groups():
                self._asker.close(group.name, self._asker.partition(group), "run-ended")
                group.closing = True
            self._asker.flush()
            self.state.drop_silent(time.monotonic())
            if not self.state.awaited() or time.monotonic() > deadline:
                _LOG.info("ended", awaited=len(self.state.awaited()))
                return
            self._read(0.05)
            self._beat(State.DRAINING)

    def _beat(self, state: State) -> None:
        self._heart.beat(
            state=state,
            epoch=self._ownership.epoch,
            version=self._version,
            running=self.state.running,
            metrics={
                "backlog_groups": len(self.state.backlog),
                "admissible_groups": self.state.admissible(),
                "kept_groups": self.state.kept,
                "dropped_groups": self.state.dropped,
                "workers": len(self.state.workers),
                "next_group": self.state.next_number,
            },
        )


_READ = ("requests", "trajectories", "samples", "steps", "weights")


def _limits(daemon: Daemon) -> Limits:
    dispatch, train = daemon.table.dispatch, daemon.table.train
    return Limits(
        group_size=dispatch.group_size,
        capacity_groups=dispatch.capacity_groups,
        batch_groups=train.batch_groups,
        max_staleness=train.max_staleness,
        steps=train.steps,
        reissue_after_s=dispatch.reissue_after_s,
        heartbeat_timeout_s=dispatch.heartbeat_timeout_s,
    )
