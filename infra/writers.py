"""Learns writers' schemas from `<run>.schemas`, so that what older and newer releases wrote is read: before anything is decoded.

`provision.ensure` and `open_run` learn for whoever opens a run's log; `Following` goes on while a daemon runs. The topic
is open to others: what is no sound schema of ours is named once in a warning and passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import structlog

from infra import wiring
from infra.log import Envelope, Log, Place, Reader
from infra.safe_text import safe
from infra.settings import Settings
from schemas.codec import MARKER, decode, num_schemas, register_writer
from schemas.errors import DeadlineExceeded, LogGap, OffsetRLError, RecordError, SettingError
from schemas.names import schemas_topic
from schemas.records import DeadReason, Record, SchemaText

FOLLOW_EVERY_S = 5.0
_V0 = MARKER + bytes.fromhex("37ed544e5e10027c")
"""How the schemas of a run of `v0` begin on its topic; nothing of such a run can be read."""
_CLOSE_S = 1.0
_SAID_AT_MOST = 1000
_said: set[str] = set()
"""What this process has warned of."""
_LOG = structlog.get_logger("offsetrl.schemas")


@contextmanager
def open_run(settings: Settings, client_id: str) -> Iterator[Log]:
    """The run's log for a command that makes no topics, with its writers' schemas learnt; closed at the end."""
    log = wiring.open_log(settings, client_id=client_id)
    try:
        learn(log, settings)
        yield log
    finally:
        log.close()


def learn(log: Log, settings: Settings) -> Writers:
    """Learn all that stands now for this run and those that its policies read.

    Raises SettingError for a run of `v0`, BrokerError, DeadlineExceeded.
    """
    writers = Writers(log, runs_of(settings), settings.kafka.patience_s)
    writers.look()
    for run in sorted(writers.too_old):
        raise SettingError(
            f"the run {run!r} was written by a release with schemas of v0, and this one has v1 and can read none of it: "
            "give the run another name, or finish it with the release that wrote it"
        )
    return writers


def runs_of(settings: Settings) -> list[str]:
    """Runs whose records are read under these settings: their own, and sources of derived runs."""
    sources = [table.source.run for table in settings.policies.values() if table.source.run]
    return list(dict.fromkeys([settings.run.name, *sources]))


class Writers:
    """The schemas topics of some runs, read from their start and then as they grow."""

    def __init__(self, log: Log, runs: Iterable[str], patience_s: float) -> None:
        self._log, self._patience_s = log, patience_s
        self._positions: dict[str, int] = {}
        self.standing: dict[str, set[str]] = {run: set() for run in runs}
        """By run: fingerprints under whose key the newest record is that schema, as far as it was read."""
        self.refused: dict[str, str] = {}
        """What could not be learnt, by what it calls itself, and why."""
        self.too_old: set[str] = set()
        """Runs that a release with schemas of `v0` wrote."""
        self._may_look = True

    def decode(self, value: bytes | None) -> Record:
        """As `schemas.codec.decode`, but what has an unknown schema is tried again after a look: one look for each poll.

        A writer's schema stands on the log before its first record, so one look behind a poll serves all that came of it.
        Raises BrokerError and DeadlineExceeded as well.
        """
        try:
            return decode(value)
        except RecordError as error:
            if error.reason != DeadReason.UNKNOWN_SCHEMA or not self._may_look:
                raise
        self._may_look = False
        self.look()
        return decode(value)

    def polled(self) -> None:
        """Records were polled: `decode` may look once more."""
        self._may_look = True

    def look(self) -> int:
        """Learn what came since the last look; how many schemas are newly known. Cheap where nothing came.

        Raises BrokerError, DeadlineExceeded.
        """
        if unseen := [run for run in self.standing if run not in self._positions]:
            there = self._log.topics()
            self._positions |= {run: 0 for run in unseen if schemas_topic(run) in there}
        return sum(self._read(run) for run in list(self._positions))

    def _read(self, run: str) -> int:
        place = Place(schemas_topic(run), 0)
        start, end = self._log.bounds(place.topic)[place.partition]
        position = self._positions[run]
        position = start if position > end else max(start, position)  # behind the end: the topic was made anew
        if position >= end:
            return 0
        num_new = 0
        deadline = time.monotonic() + self._patience_s
        reader = self._log.reader({place: position})
        try:
            while reader.position(place) < end:
                num_new += sum(self._take(run, envelope) for envelope in _poll(reader))
                self._positions[run] = reader.position(place)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{place.topic} could not be read to offset {end} within {self._patience_s:g} s; "
                        f"it came to {reader.position(place)}"
                    )
        finally:
            reader.close()
        return num_new

    def _take(self, run: str, envelope: Envelope) -> bool:
        """Learn one record; whether its schema was not known before."""
        key, value = (envelope.key or b"").decode(errors="replace"), envelope.value or b""
        self.standing[run].discard(key)
        if value.startswith(_V0):
            self.too_old.add(run)
            return False
        name = key
        try:
            record = decode(value)
            if not isinstance(record, SchemaText):
                raise RecordError(DeadReason.WRONG_KIND, f"a {type(record).__name__} stands among schemas")
            name = record.fingerprint
            before = num_schemas()
            register_writer(record.text, name)
        except RecordError as error:
            self._refuse(run, safe(name, 40), error)
            return False
        if name == key:
            self.standing[run].add(name)
        return num_schemas() > before

    def _refuse(self, run: str, name: str, error: RecordError) -> None:
        """Say once what is not learnt."""
        if len(self.refused) < _SAID_AT_MOST:
            self.refused[name] = safe(str(error))
        if name not in _said and len(_said) < _SAID_AT_MOST:
            _said.add(name)
            _LOG.warning(
                "a writer's schema is refused: its records stay unread", run=run, schema=name, error=safe(str(error))
            )


class Following:
    """Learns on in a thread of its own while a daemon runs: a newer release may publish its schemas at any time."""

    def __init__(self, log: Log, settings: Settings, every_s: float = FOLLOW_EVERY_S) -> None:
        self._writers = Writers(log, runs_of(settings), settings.kafka.patience_s)
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="schemas", daemon=True)

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        failing = False
        while not self._closed.wait(self._every_s):
            try:
                if num_new := self._writers.look():
                    _LOG.info("schemas of another release are learnt", schemas=num_new)
                failing = False
            except OffsetRLError as error:
                if not failing and not self._closed.is_set():
                    _LOG.warning("schemas of other releases cannot be followed; trying again", error=str(error))
                failing = True


def _poll(reader: Reader) -> list[Envelope]:
    """One poll. What retention took was replaced by something newer, or is nobody's any longer."""
    try:
        return reader.poll(0.2)
    except LogGap:
        return []
