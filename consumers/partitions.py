"""The partitions in a processor's hands: reads, writes, waits for acknowledgements, then commits; one writer for all.

Everything it keeps is rebuilt from the log by `assign`; `discard` throws it away. Nothing is caught here that says the
log did not do its part: the daemon discards and starts again. Members of open groups are held as the bytes that stand on
the log, and decoded again when their group closes, unless they are among the few that are kept decoded as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import structlog

from consumers.assignment import Assigned, assign
from consumers.components import Recipe
from consumers.dead_letters import cut, dead_letter
from consumers.member_cache import MemberCache
from consumers.pipeline import TOO_LARGE, Route, judge, make_outcome, without_payload
from infra.log import CORRUPT_HEADER, Committed, Envelope, Log, Pending, Place, Reader, Writer
from infra.writers import Writers
from schemas.codec import encode
from schemas.errors import BrokerError, DeadlineExceeded, RecordError, RecordTooLarge
from schemas.names import commit_group, topic
from schemas.records import KEPT, Close, DeadReason, Outcome, Trajectory
from schemas.rules.closing import Arrival
from schemas.rules.partition import Due
from schemas.validate import check_outcome, check_trajectory

_WHOLE_EVERY = 30


class _Sent(NamedTuple):
    """A record on its way: an outcome (`due`), or a dead letter for the record at `offset`."""

    partition: int
    pending: Pending
    due: Due[bytes] | None
    offset: int
    disposition: str


class Partitions:
    """The partitions of a route's trajectories that are one processor's share; all of them unless `own` says otherwise."""

    def __init__(
        self, log: Log, route: Route, recipe: Recipe, *, patience_s: float, commit_every_s: float, max_tokens: int
    ) -> None:
        self._log, self._route, self._recipe = log, route, recipe
        self._patience_s, self._commit_every_s, self._max_tokens = patience_s, commit_every_s, max_tokens
        self._source = topic(route.source_run, route.source_policy, "trajectories")
        self._samples = topic(route.run, route.policy, "samples")
        self._dead_letters = topic(route.run, route.policy, "dead-letters")
        self._group = commit_group(route.run, route.policy, "process")
        self._share: frozenset[int] | None = None  # None: all of them
        self._assigned: dict[int, Assigned] = {}
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._num_partitions = 0
        self._sent: list[_Sent] = []
        self._decoded, self._writers = MemberCache(), Writers(log, [route.source_run], patience_s)
        self._next_commit_s, self._num_commits = 0.0, 0
        self._counted: dict[int, int] = {}  # partition -> offset below which records have been counted
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._say = structlog.get_logger("offsetrl.process")

    def work(self, poll_s: float) -> int:
        """Poll once, handle what came, wait until all of it is acknowledged, commit when it is time; records handled."""
        reader, writer = self._ready()
        envelopes = reader.poll(poll_s) if reader is not None else []
        self._writers.polled()
        for envelope in envelopes:
            self._take(envelope, writer)
        self._settle()
        if time.monotonic() >= self._next_commit_s:
            self._next_commit_s = time.monotonic() + self._commit_every_s
            self._commit_softly()
        return len(envelopes)

    @property
    def num_partitions(self) -> int:
        """Partitions of the route's trajectories, asked once. Raises BrokerError."""
        if not self._num_partitions:
            self._num_partitions = len(self._log.bounds(self._source))
        return self._num_partitions

    def own(self, share: Collection[int]) -> None:
        """From now on work on these partitions: others are committed and forgotten, new ones assigned by `work`.

        Another processor may have begun on what is let go, or not stopped yet on what is gained: the chain makes one
        effect of it. Raises BrokerError or DeadlineExceeded.
        """
        wanted = frozenset(share)
        if wanted == self._share:
            return
        if lost := self._assigned.keys() - wanted:
            self._commit_softly()
            for partition in lost:
                del self._assigned[partition]
                self._decoded.forget(partition)
        if self._share is not None:
            self._say.info("another share of the partitions", before=sorted(self._share), now=sorted(wanted))
        self._share = wanted
        self._close_reader()

    def commit(self) -> None:
        """Store the positions that may be stored. Raises BrokerError or DeadlineExceeded; harmless, see the chain."""
        positions: dict[Place, Committed] = {}
        self._num_commits += 1
        is_whole = self._num_commits % _WHOLE_EVERY == 0  # one that was frozen may have stored an older position since
        for partition, assigned in self._assigned.items():
            if (found := assigned.committable()) is not None and (is_whole or found != assigned.committed):
                positions[Place(self._source, partition)] = found
                self._decoded.forget(partition, below=found.offset)  # what no open group holds
        if positions:
            self._log.commit(self._group, positions)
            for place, committed in positions.items():
                self._assigned[place.partition].committed = committed

    def discard(self) -> None:
        """Throw away reader, writer and all memory of the partitions."""
        self._close_reader()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._assigned.clear()
        self._decoded.forget()
        self._sent.clear()

    def metrics(self) -> dict[str, float]:
        """Counts of this process; groups dropped stand under `dropped:<reason>`."""
        return {**self._gauges, **{name: float(count) for name, count in self._counts.items()}}

    @property
    def positions(self) -> dict[int, int]:
        """Offset of the next record of each partition; empty while nothing is assigned."""
        return {partition: assigned.state.position for partition, assigned in self._assigned.items()}

    def _ready(self) -> tuple[Reader | None, Writer]:
        """Reader (None: nothing is owned) and writer, made anew where they were thrown away."""
        if self._writer is None:  # first, so that it has learnt its way when the first outcome is due
            self._writer = self._log.writer()
        if self._share is None:
            if not self._assigned:
                self._assign(None)
        elif gained := self._share - self._assigned.keys():
            self._assign(gained)
        if self._reader is None and self._assigned:
            places = {Place(self._source, p): assigned.state.position for p, assigned in self._assigned.items()}
            self._reader = self._log.reader(places)
        return self._reader, self._writer

    def _assign(self, gained: Collection[int] | None) -> None:
        """Build the memory of new partitions (None: of all) from the log."""
        assigned, gaps = assign(
            self._log,
            gained,
            source=self._source,
            samples=self._samples,
            group=self._group,
            patience_s=self._patience_s,
        )
        for gap in gaps:
            self._counts["gap_records"] += gap.end - gap.start
            self._say.error("unread records were removed", error=str(gap))
        self._close_reader()
        self._assigned.update(assigned)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _take(self, envelope: Envelope, writer: Writer) -> None:
        """Handle one record."""
        partition, offset, time_ms = envelope.partition, envelope.offset, envelope.time_ms
        assigned = self._assigned[partition]
        if is_new := offset >= self._counted.get(partition, 0):
            self._counted[partition] = offset + 1
        try:
            record = self._read(envelope)
        except RecordError as error:
            assigned.state.skip(offset, time_ms)
            if offset >= assigned.dead_until:
                self._bury(envelope, error, writer)
            return
        if isinstance(record, Close):
            due = assigned.state.close(record.group, offset=offset, time_ms=time_ms)
        else:
            arrival, due = assigned.state.add(
                record.group,
                size=record.group_size,
                index=record.index,
                offset=offset,
                time_ms=time_ms,
                first_request_time_ms=record.first_request_time_ms,
                lifetime_ms=record.lifetime_ms,
                payload=envelope.value or b"",
            )
            self._counts["trajectories"] += is_new
            if arrival is Arrival.JOINED:
                self._decoded.keep(partition, offset, record, len(envelope.value or b""))
            else:
                self._counts[str(arrival)] += is_new
        if due is not None:
            self._write(partition, due, writer)

    def _read(self, envelope: Envelope) -> Trajectory | Close:
        """The record in an envelope, if it may stand here. Raises RecordError."""
        if envelope.headers and any(name == CORRUPT_HEADER for name, _ in envelope.headers):
            raise RecordError(DeadReason.CORRUPT_BATCH, "the batch's checksum does not match its bytes")
        record, route = self._writers.decode(envelope.value), self._route
        if isinstance(record, Trajectory):
            check_trajectory(
                record,
                run=route.source_run,
                policy=route.source_policy,
                partition=envelope.partition,
                max_tokens=self._max_tokens,
            )
            return record
        if not isinstance(record, Close):
            raise RecordError(DeadReason.WRONG_KIND, f"a {type(record).__name__} stands among trajectories")
        place = (record.run, record.policy, record.partition)
        if place != (route.source_run, route.source_policy, envelope.partition):
            raise RecordError(DeadReason.WRONG_PLACE, f"a close record for {place} stands here")
        return record

    def _bury(self, envelope: Envelope, error: RecordError, writer: Writer) -> None:
        """Send a dead letter."""
        letter = dead_letter(envelope, error, run=self._route.run, policy=self._route.policy)
        key = f"{envelope.topic}/{envelope.partition}/{envelope.offset}".encode()
        try:
            pending = writer.send(self._dead_letters, 0, encode(letter), key=key)
        except RecordTooLarge:  # its frame made it larger than what it holds
            pending = writer.send(self._dead_letters, 0, encode(cut(letter)), key=key)
        self._sent.append(_Sent(envelope.partition, pending, None, envelope.offset, ""))
        self._say.warning("dead letter", partition=envelope.partition, offset=envelope.offset, reason=error.reason)

    def _write(self, partition: int, due: Due[bytes], writer: Writer) -> None:
        """Send the outcome of a group that closed."""
        closed = due.closed
        trajectories = [self._decoded.take(partition, at, data) for _, at, data in closed.members]
        judgement = judge(trajectories, closed.size, self._recipe)
        if judgement.failure:
            self._say.error("a component failed; its group is dropped", group=closed.group, failure=judgement.failure)
        outcome = make_outcome(
            closed, trajectories, judgement, route=self._route, partition=partition, previous=due.previous
        )
        disposition, pending = self._send(outcome, writer)
        self._sent.append(_Sent(partition, pending, due, closed.closing_offset, disposition))

    def _send(self, outcome: Outcome, writer: Writer) -> tuple[str, Pending]:
        """The disposition that was sent, and the send."""
        # The place in the partition says where it belongs; the key only helps who looks at the topic.
        key = outcome.group.encode()[:256]
        try:
            # Its columns are those of members that were checked when they came.
            check_outcome(outcome, run=outcome.run, policy=outcome.policy, partition=outcome.partition, columns=False)
            return outcome.disposition, writer.send(self._samples, outcome.partition, encode(outcome), key=key)
        except (RecordTooLarge, RecordError) as error:
            # A group that cannot be written must not stop its partition: it is dropped, in its place in the chain.
            small = without_payload(outcome, TOO_LARGE)
            self._say.error("an outcome cannot be written; its group is dropped", group=outcome.group, error=str(error))
            return small.disposition, writer.send(self._samples, small.partition, encode(small), key=key)

    def _settle(self) -> None:
        """Wait until everything sent is acknowledged. Raises SendFailed or DeadlineExceeded."""
        deadline_s = time.monotonic() + self._patience_s
        for sent in self._sent:
            ack = sent.pending.result(max(0.0, deadline_s - time.monotonic()))
            assigned = self._assigned[sent.partition]
            if sent.due is not None:
                assigned.state.acknowledged(sent.due, ack.offset)
                self._counts["outcomes"] += 1
                self._counts[KEPT if sent.disposition == KEPT else f"dropped:{sent.disposition}"] += 1
            else:
                assigned.dead_until = sent.offset + 1
                self._counts["dead_letters"] += 1
        self._sent.clear()

    def _commit_softly(self) -> None:
        """Commit, and measure; a failure changes nothing."""
        try:
            self.commit()
        except (BrokerError, DeadlineExceeded) as error:
            self._counts["failed_commits"] += 1
            self._say.warning("position not committed; tried again soon", error=str(error))
            return
        states = [assigned.state for assigned in self._assigned.values()]
        positions, reader = self.positions, self._reader
        ends = {p: reader.end(Place(self._source, p)) for p in positions} if reader is not None else positions
        self._gauges = {
            "lag": float(sum(max(0, ends[p] - position) for p, position in positions.items())),
            "open_groups": float(sum(state.num_open for state in states)),
            "open_bytes": float(sum(len(payload) for state in states for payload in state.open_payloads())),
        }
