"""`offsetrl import`: demonstrations from a file onto the log, as trajectories that a processor and a trainer take like any others.

They go where the policy's processor reads (its own topics, or those of `[policies.NAME.source]`), each as a group of one.
No log-probs exist of what no policy sampled: they stand as 0, beside the weights 0-0 that say so, and only a loss that
needs none trains on them (`schemas.rules.planning`).

Importing twice has one effect. A line's group is named by the digests of file and tokenizer and by its number; what
stands on the log is not sent again. Two imports at once: the rules of closing settle it, since a line that was asked for
(a time taken from the log, before the log was read) longer than a lifetime ago is late.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from infra import preflight, provision, wiring
from infra.log import Envelope, Log, Place
from infra.ownership import catch_up, read_record, start_positions
from infra.settings import Settings
from producers.demonstrations import ChatCodec, Demonstration, lines_of, read_demonstration
from producers.engines import model_config
from producers.tokenizer import Tokenizer
from schemas.codec import encode
from schemas.errors import DeadlineExceeded, SettingError
from schemas.names import control_topic, topic
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import Finish, Heartbeat, Role, Sampling, State, Status, Trajectory, VersionRun
from schemas.rules.versions import GIVEN
from schemas.validate import check_trajectory

NAME = "import"
"""Task, environment and worker of demonstrations."""
LIFETIME_MS = 600_000
_BATCH = 500
_SWEEPS_WITHOUT_PROGRESS = 3
_SEND_S = 60.0
_CATCH_UP_S = 300.0
_SHOWN = 10


class Totals(NamedTuple):
    """What a file holds."""

    lines: int
    tokens: int
    learnt: int


class Sent(NamedTuple):
    """What an import did."""

    sent: int
    there: int
    """Stood on the log before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file's bytes, and what its lines are read with."""

    name: str
    data: bytes
    codec: ChatCodec
    tokenizer: str
    """Digest of the tokenizer's files."""
    max_tokens: int
    vocab_size: int
    chat: bool = False
    system: str = ""

    @property
    def digest(self) -> str:
        """Names the file as it is read, with this tokenizer: 16 hex digits."""
        how = f"{self.tokenizer} {self.chat} {self.system}"
        return hashlib.sha256(hashlib.sha256(self.data).digest() + how.encode()).hexdigest()[:16]

    def check(self) -> Totals:
        """Read every line. Raises SettingError with the first bad ones."""
        wrong: list[str] = []
        num_wrong = lines = tokens = learnt = 0
        for number, line in lines_of(self.data):
            lines += 1
            try:
                found = self.read(line)
            except ValueError as error:
                num_wrong += 1
                wrong += [f"{self.name}:{number}: {error}"] if num_wrong <= _SHOWN else []
                continue
            tokens, learnt = tokens + len(found.tokens), learnt + found.num_learnt
        if wrong:
            more = f"\n  and {num_wrong - _SHOWN} more" if num_wrong > _SHOWN else ""
            raise SettingError(
                f"{num_wrong} of {lines} lines are bad, so none is sent:\n  " + "\n  ".join(wrong) + more
            )
        if not lines:
            raise SettingError(f"{self.name} holds no line")
        return Totals(lines, tokens, learnt)

    def read(self, line: bytes) -> Demonstration:
        """The demonstration on a line. Raises ValueError."""
        return read_demonstration(
            line,
            self.codec,
            max_tokens=self.max_tokens,
            vocab_size=self.vocab_size,
            chat=self.chat,
            system=self.system,
        )


def command(settings: Settings, *, policy: str, file: Path, check: bool, passes: int) -> int:
    """Check a file and, unless `check`, put it on the log; `passes`: how often it stands there, for so many epochs."""
    table = settings.policies[policy]
    preflight.check_model(table.model, f"policies.{policy}.model")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SettingError(f"cannot read {file}: {error.strerror or error}") from error
    codec = Tokenizer(table.model)
    source = Source(
        name=str(file), data=data, codec=codec, tokenizer=codec.digest, max_tokens=table.rollout.max_model_len,
        vocab_size=int(model_config(table.model)["vocab_size"]), chat=table.rollout.chat, system=table.rollout.system_prompt,
    )  # fmt: skip
    totals = source.check()
    sys.stdout.write(f"{totals.lines} demonstrations of {totals.tokens} tokens, {totals.learnt} of them to be learnt\n")
    if table.train.loss != "supervised":
        said = f"only the loss 'supervised' trains on demonstrations: under {table.train.loss!r} they are set aside"
        sys.stdout.write(f"note: {said} as no-logprobs\n")
    if check:
        return 0
    preflight.check_broker(settings)
    log = wiring.open_log(settings, client_id=NAME)
    try:
        found = Importer(log, settings, policy).send(source, passes)
    finally:
        log.close()
    sys.stdout.write(f"{found.sent} sent, {found.there} stood on the log before\n")
    return 0


def destination(settings: Settings, policy: str) -> tuple[Settings, str]:
    """Settings of the run, and the policy, whose trajectories the processor of `policy` reads."""
    given = settings.policies[policy].source
    name = given.policy or policy
    run = settings.run.model_copy(update={"name": given.run or settings.run.name})
    policies = (
        {**settings.policies, name: settings.policies[policy]} if not given.run else {name: settings.policies[policy]}
    )
    return settings.model_copy(update={"run": run, "policies": policies}), name


class Importer:
    """Puts demonstrations on the trajectories of one policy."""

    def __init__(self, log: Log, settings: Settings, policy: str) -> None:
        settings, self._policy = destination(settings, policy)
        provision.ensure(log, settings)
        self._log, self._settings, self._run = log, settings, settings.run.name
        self._topic = topic(self._run, self._policy, "trajectories")
        self._there: set[bytes] = set()
        self._name = ""

    def send(self, source: Source, passes: int = 1) -> Sent:
        """Send what does not stand on the log yet. Raises BrokerError, SendFailed, DeadlineExceeded; then try again."""
        self._there, self._name = set(), f"{NAME}-{source.digest}"
        positions = start_positions(self._log, [self._topic])
        reader, writer = self._log.reader(positions), self._log.writer()
        try:
            before, known, stuck = -1, -1, 0
            while stuck < _SWEEPS_WITHOUT_PROGRESS:
                sweep = self._sweep(source, passes)
                num_sent = 0
                while True:
                    asked_ms = self._now_ms(State.SERVING)  # first the time, then the reading: see above
                    catch_up(self._log, reader, positions, self._saw, _CATCH_UP_S)
                    before = len(self._there) if before < 0 else before
                    batch = list(islice(self._missing(sweep, source, asked_ms), _BATCH))
                    if not batch:
                        break
                    for record in batch:
                        writer.send(self._topic, record.partition, encode(record), key=record.group.encode())
                    writer.flush(_SEND_S)
                    num_sent += len(batch)
                if not num_sent:
                    self._now_ms(State.LEFT)
                    return Sent(len(self._there) - before, before)
                stuck = 0 if len(self._there) > known else stuck + 1
                known = len(self._there)
        finally:
            writer.close()
            reader.close()
        raise DeadlineExceeded(
            f"{self._topic}: what was sent arrived later than {LIFETIME_MS // 1000} s after it was asked for, "
            f"{stuck} times in a row; is the broker overloaded? Import again: what stands there is not sent again"
        )

    def _sweep(self, source: Source, passes: int) -> Iterator[tuple[str, int, bytes]]:
        """(group, number, line) of everything that is to stand on the log."""
        for turn in range(passes):
            for number, line in lines_of(source.data):
                yield f"{self._name}-{number}-{turn}", number, line

    def _missing(self, sweep: Iterator[tuple[str, int, bytes]], source: Source, asked_ms: int) -> Iterator[Trajectory]:
        """Records of the sweep that do not stand on the log, checked."""
        for group, number, line in sweep:
            if group.encode() in self._there:
                continue
            record = self._record(source, group, number, source.read(line), asked_ms)
            max_tokens = self._settings.kafka.max_tokens
            check_trajectory(
                record, run=self._run, policy=self._policy, partition=record.partition, max_tokens=max_tokens
            )
            yield record

    def _record(self, source: Source, group: str, line: int, given: Demonstration, asked_ms: int) -> Trajectory:
        return Trajectory(
            run=self._run,
            policy=self._policy,
            group=group,
            group_size=1,
            index=0,
            attempt=0,
            partition=line % self._settings.run.partitions,
            task=NAME,
            environment=NAME,
            item=line,
            seed=0,
            first_request_time_ms=asked_ms,
            lifetime_ms=LIFETIME_MS,
            sampling=Sampling(max_tokens=given.num_learnt),
            model="",
            tokenizer=source.tokenizer,
            status=Status.OK,
            finish=Finish.STOP,
            reward=given.reward,
            worker=NAME,
            session=source.digest,
            region="",
            versions=(VersionRun(*GIVEN, given.num_learnt),),
            segments=given.segments,
            tokens=pack_ints(given.tokens),
            loss_mask=pack_bits([s.role is Role.SAMPLED for s in given.segments for _ in range(s.count)]),
            logprobs=pack_floats([0.0] * given.num_learnt),
        )

    def _saw(self, envelope: Envelope) -> None:
        """Note a line that stands on the log in time; one that is late has no effect."""
        key = envelope.key or b""
        if not key.startswith(f"{self._name}-".encode()):
            return
        record = read_record(envelope)
        if isinstance(record, Trajectory) and envelope.time_ms <= record.first_request_time_ms + record.lifetime_ms:
            self._there.add(record.group.encode())

    def _now_ms(self, state: State) -> int:
        """Say on control that this import is there; the append time of that is the log's own time."""
        record = Heartbeat(run=self._run, policy=self._policy, role=NAME, name=NAME, session="", state=state)
        writer = self._log.writer()
        try:
            key = f"{NAME}/{self._policy}/{NAME}".encode()
            ack = writer.send(control_topic(self._run), 0, encode(record), key=key).result(_SEND_S)
        finally:
            writer.close()
        return _append_time_ms(self._log, Place(control_topic(self._run), 0), ack.offset)


def _append_time_ms(log: Log, place: Place, offset: int) -> int:
    reader = log.reader({place: offset})
    deadline = time.monotonic() + _SEND_S
    try:
        while time.monotonic() < deadline:
            for envelope in reader.poll(0.5, max_records=1):
                return envelope.time_ms
    finally:
        reader.close()
    raise DeadlineExceeded(f"{place.topic}[{place.partition}]: offset {offset} could not be read within {_SEND_S:g} s")
