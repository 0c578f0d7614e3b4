"""DAEMON `offsetrl eval`: measures published versions on items held out from training, and says on `evals` how good each is.

| consumes | weights (announcements), evals (what was measured already), steps (the run's end); manifests and blobs from the store |
| produces | one Eval record per version, task and split |
| waits for | a version that is to be measured |
| after a crash | reads evals, and measures what is not there yet |

Its requests are its own, pinned to one version: they stand on no topic, so neither admission nor training knows of them.
Two evaluators may measure the same version: the first record counts (`schemas.rules.evals`).
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.lifecycle import Exit
from infra.log import Envelope, Reader
from infra.ownership import catch_up, read_record, start_positions
from infra.weights.adapter import loadable
from infra.weights.fetch import fetch, listed, load_manifest, prune
from producers.agenda import Agenda, Wanted, check_split
from producers.calls import Calls, stuck_error
from producers.engine import Engine
from producers.engines import make_engine
from producers.environments import make_environment
from producers.episode import WorkerInfo
from producers.episode_runner import EpisodeRunner
from producers.evaluation import Sitting, make_exam, requests_of, sum_up
from producers.prompting import make_prompts
from producers.splits import Split
from producers.tokenizer import Tokenizer
from schemas.codec import encode
from schemas.errors import (
    BrokerError,
    DeadlineExceeded,
    LogGap,
    ObjectMissing,
    SendFailed,
    StoreError,
    WeightsError,
)
from schemas.names import topic
from schemas.records import Eval, State, Version
from schemas.rules.evals import about, in_short
from schemas.validate import check_eval

_POLL_S = 0.5
_SEND_S = 30.0
_CATCH_UP_S = 120.0
_FIRST_WEIGHTS_S = 300.0
_BACKOFF_S = (0.5, 10.0)
_DISTURBED = (BrokerError, StoreError, SendFailed, DeadlineExceeded, LogGap)
_LOG = structlog.get_logger("offsetrl.eval")


def run(daemon: Daemon, **wanted: Any) -> int:
    """Measure what is wanted, then end; with `follow`, until told to stop or the run's last version is measured.

    Raises DependencyError, after the version in hand, where calls into the environment that never came back are why it ends.
    """
    heart = Heart(daemon, "eval", hold_s=_FIRST_WEIGHTS_S)
    heart.beat(State.STARTING)
    evaluator = Evaluator(daemon, heart, Wanted(**wanted))
    try:
        while not (daemon.stop.requested or evaluator.done):
            daemon.stop.wait(evaluator.turn())
    finally:
        evaluator.close()
        heart.close()
    return evaluator.code


class Evaluator:
    """An engine of its own, and what is left to measure with it."""

    def __init__(self, daemon: Daemon, heart: Heart, wanted: Wanted) -> None:
        self._daemon, self._heart = daemon, heart
        settings, self._table = daemon.settings, daemon.table
        self._run, self._policy, task = settings.run.name, daemon.policy, self._table.task
        self._environment = make_environment(task.environment, task.settings, settings.run.seed)
        split = Split(self._environment.num_items, settings.run.seed, self._table.eval.share)
        check_split(wanted.split, split, f"policies.{daemon.policy}.eval.share")
        self._exam = make_exam(
            run=self._run, policy=self._policy, table=self._table, split=split, name=wanted.split,
            episodes=wanted.episodes or self._table.eval.episodes, seed=settings.run.seed,
        )  # fmt: skip
        self.agenda = Agenda(
            wanted, run=self._run, policy=self._policy, task=self._exam.task,
            every=wanted.every or self._table.eval.every or 1, stop_at=self._table.train.stop_at,
        )  # fmt: skip
        self._root: Path = settings.run.folder / self._run / self._policy / "weights" / daemon.name
        self._topics = [topic(self._run, self._policy, kind) for kind in ("weights", "evals")]
        self._steps = topic(self._run, self._policy, "steps")
        if self.agenda.needs_steps:
            self._topics.append(self._steps)
        self._reader: Reader | None = None
        self._engine: Engine | None = None
        self._runner: EpisodeRunner | None = None
        self._calls = Calls()
        self._tokenizer = ""
        self._unsent: Eval | None = None
        self._failures = 0
        self._first_by = time.monotonic() + _FIRST_WEIGHTS_S
        self.done, self.code = False, int(Exit.OK)

    def turn(self) -> float:
        """Read, and measure one version if one is due; how long to rest before the next turn, in seconds.

        Raises DependencyError when it is stuck and more is to come: what was measured then stands on the log.
        """
        try:
            self._read()
            self._append()
            name = None if self.is_stuck else self.agenda.next(self._stored)
            if name is not None:
                self._measure(name)
                self._append()
            self._end(waiting=name is None)
        except _DISTURBED as error:
            self._drop_reader()
            if not self._failures:
                _LOG.warning("disturbed; trying again", error=str(error))
            self._failures += 1
            return min(_BACKOFF_S[0] * 2.0 ** min(self._failures - 1, 10), _BACKOFF_S[1])
        if self._failures:
            _LOG.info("evaluating again", failures=self._failures)
        self._failures = 0
        self._beat(0)
        if self.is_stuck and not self.done:
            limit, environment = self._table.rollout.max_stuck_calls, self._table.task.environment
            raise stuck_error(self._calls.num_stuck, limit, environment, "evaluator")
        return 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls into the environment never came back that a fresh process is better."""
        return self._calls.num_stuck > self._table.rollout.max_stuck_calls

    def close(self) -> None:
        """Let go of everything."""
        self._drop_reader()
        self._calls.close()
        if self._engine is not None:
            self._engine.close()

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """At first all of the topics; then what is new."""
        if self._reader is None:
            self.agenda.forget()
            positions = start_positions(self._daemon.log, self._topics)
            self._reader = self._daemon.log.reader(positions)
            catch_up(self._daemon.log, self._reader, positions, self._take, _CATCH_UP_S)
            return
        for envelope in self._reader.poll(_POLL_S):
            self._take(envelope)

    def _take(self, envelope: Envelope) -> None:
        record = read_record(envelope)
        if envelope.topic == self._steps:
            self.agenda.read_step(envelope.offset, record, envelope.time_ms)
        else:
            self.agenda.read(record)

    def _stored(self) -> list[Version]:
        return listed(self._daemon.store, self._run, self._policy)

    def _end(self, *, waiting: bool) -> None:
        """See whether this was all."""
        if waiting and self.agenda.heads.head is None and not self.agenda.named and time.monotonic() > self._first_by:
            _LOG.error("no weights were announced in time; is the trainer running?", waited_s=_FIRST_WEIGHTS_S)
            self.done, self.code = True, int(Exit.DEADLINE)
        elif self.agenda.done:
            self.done = True
            if result := self.agenda.result():
                _LOG.info("result", **in_short(result))

    # Measuring -------------------------------------------------------------------------------------------------------

    def _measure(self, name: Version) -> None:
        """Run the exam on a version; nothing comes of one that was cut short."""
        try:
            self._load(name)
        except (ObjectMissing, WeightsError) as error:
            self._give_up(name, error)
            return
        assert self._runner is not None
        started = time.monotonic()
        requests = requests_of(self._exam, name, self._environment)
        sitting = Sitting(requests, self._runner, self._info(), self._table.rollout.concurrency)
        while not sitting.step():
            self._beat(len(self._runner))
            if self._daemon.stop.requested:
                sitting.abandon()
                _LOG.info("stopped before the end: another evaluator has to measure it", version=str(name))
                return
        seconds = time.monotonic() - started
        try:
            self._unsent = sum_up(self._exam, name, sitting.ended, seconds=seconds)
        except ValueError as error:
            self._give_up(name, error)

    def _load(self, name: Version) -> None:
        """The engine with this version's weights, fetched and verified."""
        head = self.agenda.heads.head
        digest = head.digest if head and head.name == name else ""
        manifest = load_manifest(self._daemon.store, self._run, self._policy, name, digest)
        folder = loadable(fetch(self._daemon.store, manifest, manifest.digest, self._root))
        if self._engine is None:
            self._start(folder, name)
        elif self._engine.version != name:
            self._engine.load(folder, name)
        assert self._engine is not None and self._engine.version == name, name
        prune(self._root, keep=1, in_use=[name])

    def _start(self, folder: Path, name: Version) -> None:
        """The engine and what runs episodes on it, with the first weights."""
        rollout = self._table.rollout
        codec = Tokenizer(folder)
        self._tokenizer = codec.digest
        self._engine = make_engine(rollout.engine, folder=folder, version=name, table=rollout)
        self._runner = EpisodeRunner(
            engine=self._engine,
            environment=self._environment,
            codec=codec,
            make_prompts=functools.partial(make_prompts, codec, rollout.chat, rollout.system_prompt),
            calls=self._calls,
            table=rollout,
            clock=lambda: time.monotonic(),
        )

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            name=self._daemon.name, session=self._heart.session, region=self._daemon.region, model="",
            tokenizer=self._tokenizer, max_model_len=self._table.rollout.max_model_len,
        )  # fmt: skip

    def _append(self) -> None:
        """Append what was measured, unless somebody's record of it stands there; kept until it is acknowledged."""
        record = self._unsent
        if record is None:
            return
        if about(record) not in self.agenda.found:
            check_eval(record, run=self._run, policy=self._policy)
            writer = self._daemon.log.writer()
            try:
                writer.send(self._topics[1], 0, encode(record)).result(_SEND_S)
            finally:
                writer.close()
            _LOG.info("evaluated", **in_short(record))
        self.agenda.read(record)
        self._unsent = None

    def _give_up(self, name: Version, error: Exception) -> None:
        self.agenda.give_up(name)
        self.code = int(Exit.FAILED) if self.agenda.named else self.code
        _LOG.error("not evaluated", version=str(name), error=str(error))

    def _beat(self, running: int) -> None:
        name = self._engine.version if self._engine else Version(0, -1)
        metrics = {"evaluations": float(len(self.agenda.found)), "stuck_calls": float(self._calls.num_stuck)}
        self._heart.beat(
            state=State.SERVING, epoch=name.epoch, version=name.version, running=running,
            capacity=self._table.rollout.concurrency, metrics=metrics,
        )  # fmt: skip

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
