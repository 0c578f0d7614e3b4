"""What a dispatcher reads: from which offsets, which records count, and where to begin again after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import structlog

from infra.daemon import Daemon
from infra.log import Bounds, Committed, Envelope, Place
from infra.ownership import Ownership, catch_up, read_record
from producers.dispatch_state import DispatchState, Limits
from producers.groups import Worker, group_number
from producers.trails import Mark, Note, Trail, from_text, to_text
from schemas.errors import RecordError
from schemas.names import commit_group, control_topic, topic
from schemas.records import (
    Announcement,
    Claim,
    Close,
    Heartbeat,
    Outcome,
    Partial,
    Record,
    Request,
    State,
    Trajectory,
)
from schemas.validate import check_partial, check_trajectory

_KINDS = ("requests", "trajectories", "partials", "samples", "steps", "weights")
_NOTES: Mapping[str, Mapping[str, type]] = {
    "requests": {"epoch": int, "nonce": str},
    "trajectories": {},
    "partials": {},
    "samples": {"last": int, "kept": int, "dropped": int},
}
"""Topics that are not read from their start, and what their notes hold."""
_LOG = structlog.get_logger("offsetrl.dispatch")


def limits(daemon: Daemon) -> Limits:
    """The numbers of this daemon's policy."""
    dispatch, train, task = daemon.table.dispatch, daemon.table.train, daemon.table.task
    return Limits(
        group_size=dispatch.group_size,
        capacity_groups=dispatch.capacity_groups,
        batch_groups=train.batch_groups,
        max_staleness=train.max_staleness,
        stop_at=train.stop_at,
        reissue_after_s=dispatch.reissue_after_s,
        heartbeat_timeout_s=dispatch.heartbeat_timeout_s,
        memory_groups=task.memory_groups,
        requires=frozenset(task.requires),
    )


class Feed:
    """One reader of everything; `state` is what it has read, `ownership` whose inboxes are."""

    def __init__(self, daemon: Daemon, state: DispatchState, ownership: Ownership, now_s: Callable[[], float]) -> None:
        self._daemon, self.state, self._ownership, self._now_s = daemon, state, ownership, now_s
        settings = daemon.settings
        self._run_name, self._policy = settings.run.name, daemon.policy
        self._control_topic = control_topic(self._run_name)
        self._names = {kind: topic(self._run_name, self._policy, kind) for kind in _KINDS}
        self._kinds = {name: kind for kind, name in self._names.items()}
        self._handlers: dict[str, Callable[[Envelope, Record], None]] = {
            "requests": self._requests,
            "trajectories": self._trajectories,
            "partials": self._partials,
            "samples": self._samples,
            "steps": self._steps,
            "weights": self._weights,
            "control": self._control,
        }
        self.version = -1
        """Newest version announced."""
        self.rival = 0
        """Greatest epoch that another process has claimed."""
        self._counts: dict[int, tuple[int, int]] = {}
        self._orphans: set[int] = set()
        self._stored: Mapping[Place, Committed] = {}
        bounds = {name: daemon.log.bounds(name) for name in (*self._names.values(), self._control_topic)}
        ends = {Place(name, number): bound for name, found in bounds.items() for number, bound in found.items()}
        positions = {place: bound.start for place, bound in ends.items()}
        positions.update(self._stored_positions(ends))
        self.places = list(positions)
        memory = state.history.per_partition
        self._trails = {
            place: Trail(memory if self._kinds[place.topic] == "samples" else 0) for place in self._noted(positions)
        }
        self.reader = daemon.log.reader(positions)

    # Reading -------------------------------------------------------------------------------------------------------

    def catch_up(self, timeout_s: float, *kinds: str) -> None:
        """Read up to the end that the log has now; `kinds`: only these topics' ends. Raises DeadlineExceeded."""
        places = [place for place in self.places if not kinds or self._kinds.get(place.topic) in kinds]
        catch_up(self._daemon.log, self.reader, places, self.handle, timeout_s)

    def read(self, timeout_s: float) -> None:
        """What comes next."""
        for envelope in self.reader.poll(timeout_s):
            self.handle(envelope)

    def caught_up(self) -> None:
        """History is read."""
        self.state.caught_up(self._now_s(), known_from=self._known_from)

    def handle(self, envelope: Envelope) -> None:
        """Take in one record."""
        record = read_record(envelope)
        self.state.saw_time(envelope.time_ms)
        if record is not None:
            self._handlers[self._kinds.get(envelope.topic, "control")](envelope, record)

    def _requests(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Claim):
            self._claimed(record.epoch, record.nonce)
            self._ownership.saw(envelope, record)
        elif isinstance(record, Request):
            self._claimed(record.epoch, record.nonce)
            if self._ownership.proves(envelope, record.epoch, record.nonce):
                self._mark(envelope, record.group, {"epoch": record.epoch, "nonce": record.nonce})
                self.state.saw_request(record, envelope.time_ms, self._now_s())

    def _claimed(self, epoch: int, nonce: str) -> None:
        if nonce not in self._ownership.nonces:
            self.rival = max(self.rival, epoch)

    def _trajectories(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Trajectory) and self._is_valid(record, envelope, check_trajectory):
            self._mark(envelope, record.group)
            self.state.saw_trajectory(record, envelope.time_ms, envelope.offset)
        elif isinstance(record, Close) and record.partition == envelope.partition:
            self._mark(envelope, record.group)
            self.state.saw_close(record, envelope.time_ms)

    def _partials(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Partial) and self._is_valid(record, envelope, check_partial):
            self._mark(envelope, record.group)
            self.state.saw_partial(record, envelope.offset, self._now_s())

    def _samples(self, envelope: Envelope, record: Record) -> None:
        if not isinstance(record, Outcome):
            return
        partition = envelope.partition
        chain = self.state.chains[partition]
        if partition in self._orphans:
            chain.last = record.previous  # retention took the chain's beginning: it goes on with what is still there
            self._orphans.remove(partition)
        last = chain.last
        if self.state.saw_outcome(partition, record):
            kept, dropped = self._counts.get(partition, (0, 0))
            self._counts[partition] = (kept + record.kept, dropped + (not record.kept))
            note = {"last": last, "kept": kept, "dropped": dropped}
            self._mark(envelope, record.group, note, (record.partition, record.closing_offset))

    def _steps(self, envelope: Envelope, record: Record) -> None:
        self.state.saw_step(envelope.offset, record, envelope.time_ms)

    def _weights(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Announcement):
            self.version = max(self.version, record.version)

    def _control(self, envelope: Envelope, record: Record) -> None:
        if isinstance(record, Heartbeat) and (record.role, record.policy) == ("rollout", self._policy):
            self._worker(record, envelope.time_ms)
        elif isinstance(record, Claim) and (record.role, record.policy) == ("dispatch", self._policy):
            self._claimed(record.epoch, record.nonce)
            self._ownership.heard(record.epoch)

    def _worker(self, beat: Heartbeat, time_ms: int) -> None:
        tags = frozenset(filter(None, beat.labels.get("tags", "").split(",")))
        worker = Worker(
            beat.name, beat.session, beat.inbox, beat.capacity, self._now_s(), time_ms, tags=tags,
            draining=beat.state is State.DRAINING,
        )  # fmt: skip
        gone = beat.state is State.LEFT or not 0 <= beat.inbox < self._daemon.settings.run.inboxes
        self.state.saw_worker(worker, gone)

    def _is_valid(self, record: Trajectory | Partial, envelope: Envelope, check: Callable[..., None]) -> bool:
        max_tokens = self._daemon.settings.kafka.max_tokens
        try:
            check(record, run=self._run_name, policy=self._policy, partition=envelope.partition, max_tokens=max_tokens)
        except RecordError:
            return False  # the processor will dead-letter a trajectory; a chunk is only passed over
        return True

    # Beginning again -----------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Store from where a successor must read, if that has changed: about one lifetime back."""
        now = {place: self._position(place) for place in self._trails}
        if changed := {place: entry for place, entry in now.items() if self._stored.get(place) != entry}:
            self._daemon.log.commit(self._group, changed)
            self._stored = now

    @property
    def _group(self) -> str:
        return commit_group(self._run_name, self._policy, "dispatch")

    def _noted(self, places: Iterable[Place]) -> list[Place]:
        return [place for place in places if self._kinds.get(place.topic) in _NOTES]

    def _stored_positions(self, ends: Mapping[Place, Bounds]) -> dict[Place, int]:
        """What was stored, with the notes taken in; nothing unless it is whole and the log as long as it was."""
        places = self._noted(ends)
        stored = self._daemon.log.committed(self._group, places)
        notes = {
            place: note
            for place, entry in stored.items()
            if entry.offset <= ends[place].end
            and (note := from_text(entry.note, _NOTES[self._kinds[place.topic]])) is not None
        }
        removed = {place for place in places if ends[place].start > (stored[place].offset if place in notes else 0)}
        self._orphans = {place.partition for place in removed if self._kinds[place.topic] == "samples"}
        if len(notes) < len(places):
            self._known_from = None if removed else 0
            return {}
        self._stored = stored
        self._known_from = max(int(note["floor"]) for note in notes.values())
        self.state.numbers.raise_floor(self._known_from)
        for place, note in notes.items():
            self._take_note(place, note)
        return {place: max(stored[place].offset, ends[place].start) for place in places}

    def _take_note(self, place: Place, note: Note) -> None:
        if self._kinds[place.topic] == "requests" and note["epoch"]:
            self._claimed(int(note["epoch"]), str(note["nonce"]))
            self._ownership.resume(place, int(note["epoch"]), str(note["nonce"]))
        elif self._kinds[place.topic] == "samples":
            kept, dropped = int(note["kept"]), int(note["dropped"])
            self.state.chains[place.partition].last = int(note["last"])
            self._counts[place.partition] = (kept, dropped)
            self.state.kept, self.state.dropped = self.state.kept + kept, self.state.dropped + dropped

    def _mark(
        self, envelope: Envelope, group: str, note: Note | None = None, key: tuple[int, int] | None = None
    ) -> None:
        number = group_number(group)
        if number is None and key is None:
            return  # a stranger's group, which has no number
        self._trails[envelope.place].saw(Mark(envelope.offset, -1 if number is None else number, note or {}, key))

    def _position(self, place: Place) -> Committed:
        state, kind = self.state, self._kinds[place.topic]
        floor = state.numbers.floor
        mark = self._trails[place].first(floor, state.backlog)
        offset, note = (mark.offset, mark.note) if mark else (self.reader.position(place), self._note(place))
        if kind == "trajectories":  # strangers have no number
            strays = [stray.offset for stray in state.strays.values() if stray.partition == place.partition]
            offset = min([offset, *strays])
        return Committed(offset, to_text(floor, note))

    def _note(self, place: Place) -> Note:
        """What must be known of everything read of this partition."""
        kind = self._kinds[place.topic]
        if kind == "requests":
            epoch, nonce = self._ownership.owner(place)
            return {"epoch": epoch, "nonce": nonce}
        if kind == "samples":
            kept, dropped = self._counts.get(place.partition, (0, 0))
            return {"last": self.state.chains[place.partition].last, "kept": kept, "dropped": dropped}
        return {}
