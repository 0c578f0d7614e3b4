"""DAEMON `offsetrl dispatch`: asks for rollouts, in time and not too many, and closes what never completes.

| consumes | requests (its own, and other dispatchers' claims), trajectories, partials, samples, steps, weights, control |
| produces | requests into workers' inboxes, close records on trajectories, claims |
| waits for | version 0 of the weights, before the first request; live workers; as a standby, for the other to be gone |
| after a crash | reads about one lifetime of the log, claims the inboxes with a higher epoch, asks for what was left out |

Of several dispatchers the newest claim wins; the others end with exit code 4, also one that comes back from being frozen.
"""

from __future__ import annotations

import time

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.log import Place
from infra.ownership import Ownership
from producers.asking import Asker
from producers.dispatch_feed import Feed, limits
from producers.dispatch_state import DispatchState
from producers.groups import Group
from producers.lengths import predicted_length
from producers.standby import wait_for_turn
from schemas.errors import BrokerError, DeadlineExceeded, LogGap, SendFailed, Superseded
from schemas.names import topic
from schemas.records import State

_CATCH_UP_S = 120.0
_END_S = 20.0
_STORE_EVERY_S = 2.0
_BACKOFF_S = (0.5, 10.0)
_DISTURBED = (BrokerError, SendFailed, DeadlineExceeded, LogGap)
_LOG = structlog.get_logger("offsetrl.dispatch")


def run(daemon: Daemon) -> int:
    """Dispatch until told to stop; a disturbed log means a new claim and a new reading of it."""
    heart = Heart(daemon, "dispatch")
    dispatching = Dispatching(daemon, heart)
    try:
        if daemon.table.dispatch.standby:
            wait_for_turn(daemon, heart)
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
        self._epoch = 0
        self._nonces: set[str] = set()

    def turn(self) -> float:
        """One turn; how long to rest before the next one, in seconds. Raises Superseded."""
        try:
            if self._dispatcher is None:
                self._heart.beat(State.STARTING)
                self._dispatcher = Dispatcher(self._daemon, self._heart, self._nonces)
                self._dispatcher.claim(after=self._epoch)
                self._epoch = self._dispatcher.epoch
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

    def __init__(self, daemon: Daemon, heart: Heart, nonces: set[str] | None = None) -> None:
        """`nonces`: of the claims that this process has tried before; those of this one are added."""
        self._daemon, self._heart = daemon, heart
        settings = daemon.settings
        self.state = DispatchState(limits(daemon), settings.run.partitions)
        requests = topic(settings.run.name, daemon.policy, "requests")
        inboxes = [Place(requests, inbox) for inbox in range(settings.run.inboxes)]
        self._ownership = Ownership("dispatch", settings.run.name, daemon.policy, inboxes)
        if nonces is not None:
            self._ownership.nonces = nonces
        self._feed = Feed(daemon, self.state, self._ownership, lambda: time.monotonic())
        self._stored_s = float("-inf")
        self._lacking = False
        try:
            self._asker = Asker(daemon)
        except BrokerError:
            self._feed.reader.close()
            raise

    @property
    def epoch(self) -> int:
        """Of its claim; 0 before."""
        return self._ownership.epoch

    def turn(self) -> None:
        """Read, then ask, ask again and close as the state says; every record written is read again before the next turn."""
        self._read(0.05)
        if self._close_strays() + self._ask_missing() + self._ask_overdue() + self._close_expired() + self._admit():
            self._settle()
        self._store()
        self._beat(State.SERVING)

    def close(self) -> None:
        """Let go of the connections."""
        self._feed.reader.close()
        self._asker.close_writer()

    def claim(self, after: int = 0) -> None:
        """Read, own every inbox, read up to there. Raises Superseded, also where this process owned them with epoch
        `after` and another one has claimed since: it was frozen or cut off, and the other goes on."""
        self._catch_up()  # control first: a claim whose inbox record retention removed still stands there
        if after and self._feed.rival > after:
            raise Superseded(
                f"dispatch of {self._daemon.settings.run.name}.{self._daemon.policy}: this process had claimed epoch "
                f"{after}, and another one has claimed epoch {self._feed.rival} since: this process ends, the newer one goes on"
            )
        claim = self._ownership.claim(self._daemon.log, self._feed.reader, self._feed.handle, _CATCH_UP_S)
        self._asker.owns(claim)
        self._catch_up()
        self._feed.caught_up()
        self._store()
        _LOG.info("claimed", epoch=claim.epoch, running=self.state.running, next_group=self.state.next_number)

    def _catch_up(self, *kinds: str) -> None:
        self._feed.catch_up(_CATCH_UP_S, *kinds)

    def _read(self, timeout_s: float) -> None:
        self._feed.read(timeout_s)

    def _store(self) -> None:
        """Now and then say from where a successor must read. A failure is harmless: it reads more."""
        if time.monotonic() - self._stored_s < _STORE_EVERY_S:
            return
        self._stored_s = time.monotonic()
        try:
            self._feed.store()
        except (BrokerError, DeadlineExceeded) as error:
            _LOG.info("positions were not stored", error=str(error))

    # Writing -------------------------------------------------------------------------------------------------------

    def _admit(self) -> int:
        """Ask for new groups, as many as admission allows and workers take; long ones first."""
        for lost in self.state.drop_silent(time.monotonic()):
            _LOG.warning("worker lost: its heartbeats stopped", worker=lost.name, session=lost.session)
        if self._feed.version < 0:
            return 0
        wanted = min(self.state.admissible(), self.state.places_for_groups())
        self._say_lacking(self.state.admissible())
        groups = [self._new_group() for _ in range(wanted)]
        sent = 0
        for place in self._starting_order(groups):
            group = groups[place]
            if worker := self.state.choose_worker(group.group_size):
                sent += self._asker.ask(group, range(group.group_size), 0, worker)
            else:
                del self.state.groups[group.name]
        return sent

    def _new_group(self) -> Group:
        state = self.state
        group = Group(state.next_number, state.limits.group_size, min_version=state.next_min_version())
        group.item = self._asker.choose_item(group.number, state.history)
        group.predicted = predicted_length(group.item, state.history)
        state.groups[group.name] = group
        return group

    def _starting_order(self, groups: list[Group]) -> list[int]:
        """Places, those first that need the oldest weights, of these the longest."""
        order = self.state.predictions.order([group.predicted for group in groups])
        return sorted(order, key=lambda place: groups[place].min_version)

    def _say_lacking(self, admissible: int) -> None:
        """Say once that there are workers, and none that may be asked."""
        taking = [worker for worker in self.state.workers.values() if not worker.draining]
        lacking = bool(admissible and taking and not self.state.able())
        if lacking and not self._lacking:
            _LOG.warning(
                "no live worker has the tags that the task requires: give one rollout.tags",
                requires=sorted(self.state.limits.requires),
                workers=len(self.state.workers),
            )
        self._lacking = lacking

    def _ask_missing(self) -> int:
        """Members that a dispatcher which died between two writes never asked for."""
        return sum(
            self._asker.ask(group, missing, 0, worker)
            for group, missing in self.state.unasked()
            if (worker := self.state.choose_worker(len(missing)))
        )

    def _ask_overdue(self) -> int:
        """Members whose worker is gone or too slow: once more, elsewhere if possible, from the last token known."""
        if not self.state.overdue(time.monotonic()) or self.state.choose_worker(1) is None:
            return 0
        self._catch_up("partials", "trajectories")  # what its worker handed over before it left
        sent = 0
        for group, index in self.state.overdue(time.monotonic()):
            asked = group.asked[index]
            if worker := self.state.choose_worker(1, avoid=asked.session):
                resume = self.state.resume(group, index)
                sent += self._asker.ask(group, [index], asked.attempt + 1, worker, resume)
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
        self._catch_up("requests")
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
            version=self._feed.version,
            running=self.state.running,
            metrics={
                "backlog_groups": len(self.state.backlog),
                "admissible_groups": self.state.admissible(),
                "kept_groups": self.state.kept,
                "dropped_groups": self.state.dropped,
                "workers": len(self.state.workers),
                "next_group": self.state.next_number,
                "length_correlation": self.state.predictions.correlation,
            },
        )
