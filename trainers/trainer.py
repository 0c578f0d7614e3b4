"""DAEMON `offsetrl train`: plans steps from outcomes, executes them at its own pace, publishes weights.

| consumes | samples; steps (its own ledger, and other trainers' claims) |
| produces | claims, plans and results on steps; blobs and manifests in the store; announcements on weights; checkpoints on disk |
| waits for | a batch of kept outcomes |
| after a crash | loads the newest checkpoint whose last plan counts, claims with a higher epoch, executes again the plans beyond it |

Of several trainers of a policy the newest claim wins; the others end with exit code 4 and nothing of theirs is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.log import Envelope, Place, Reader
from infra.ownership import Ownership, catch_up, read_record, start_positions
from infra.weights import announce
from schemas.codec import encode
from schemas.errors import BrokerError, DeadlineExceeded, SendFailed, StoreError, Superseded
from schemas.names import topic
from schemas.records import Claim, Outcome, Plan, Result, State
from schemas.rules.ledger import Ledger
from schemas.rules.planning import Chosen, choose, set_aside
from schemas.seeds import derive_seed
from trainers.backlog import Backlog, SamplesPosition
from trainers.publisher import Publisher

if TYPE_CHECKING:
    from trainers.learner import Learner

_SEND_S = 30.0
_CATCH_UP_S = 300.0
_WATCH_S = 1.0
_BACKOFF_S = (0.5, 10.0)
_DISTURBED = (BrokerError, StoreError, SendFailed, DeadlineExceeded)
_LOG = structlog.get_logger("offsetrl.train")


def run(daemon: Daemon) -> int:
    """Train until told to stop; a disturbed log or store means a new claim and the newest checkpoint."""
    heart = Heart(daemon, "train")
    training = Training(daemon, heart)
    try:
        while not daemon.stop.requested:
            daemon.stop.wait(training.turn())
        training.end()
    finally:
        training.close()
        heart.close()
    return 0


def make_learner(daemon: Daemon) -> Learner:
    """The learner of a daemon's policy; torch is imported here, so that nothing else of this file needs it."""
    from trainers.learner import Learner

    return Learner(daemon)


class Training:
    """Turns that survive a log or a store that is away: after any error a new claim, and the newest checkpoint."""

    def __init__(self, daemon: Daemon, heart: Heart) -> None:
        self._daemon, self._heart = daemon, heart
        self._trainer: Trainer | None = None
        self._failures = 0

    def turn(self) -> float:
        """One turn; how long to rest before the next one, in seconds. Raises Superseded."""
        try:
            if self._trainer is None:
                self._heart.beat(State.STARTING)
                self._trainer = Trainer(self._daemon, self._heart)
                self._trainer.take_over()
            self._trainer.turn()
        except _DISTURBED as error:
            self.close()
            if not self._failures:
                _LOG.warning("disturbed; going back to the newest checkpoint", error=str(error))
            self._failures += 1
            return min(_BACKOFF_S[0] * 2.0 ** min(self._failures - 1, 10), _BACKOFF_S[1])
        if self._failures:
            _LOG.info("training again", failures=self._failures)
        self._failures = 0
        return 0.0

    def end(self) -> None:
        """Set aside what is left and save. A failure is harmless: the next trainer does it, from the log."""
        try:
            if self._trainer is not None:
                self._trainer.end()
        except _DISTURBED as error:
            _LOG.warning("the end was disturbed; the next trainer goes on from the log", error=str(error))

    def close(self) -> None:
        """Let go of the connections."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None


class Trainer:
    """One claim's worth of training."""

    def __init__(self, daemon: Daemon, heart: Heart) -> None:
        self._daemon, self._heart, self._table = daemon, heart, daemon.table.train
        self._run_name, self._policy = daemon.settings.run.name, daemon.policy
        self._steps_topic = topic(self._run_name, self._policy, "steps")
        self._samples_topic = topic(self._run_name, self._policy, "samples")
        self._steps = Place(self._steps_topic, 0)
        self.ledger = Ledger()
        self._ownership = Ownership("train", self._run_name, self._policy, [self._steps])
        self._learner = make_learner(daemon)
        self._publisher: Publisher | None = None
        self._backlog = Backlog(self._run_name, self._policy, {})
        self._idle_s, self._starved_at = 0.0, time.monotonic()
        self._metrics: dict[str, float] = {}
        self._watched_at = 0.0
        self._mine: tuple[int, bool] = (-1, False)
        """Offset of the record written last on steps, and whether it counts there."""
        self._writer = daemon.log.writer()
        self._samples: Reader | None = None
        try:
            self._reader = daemon.log.reader(start_positions(daemon.log, [self._steps_topic]))
        except BrokerError:
            self._writer.close()
            raise

    def turn(self) -> None:
        """Read, plan, execute."""
        self._read_samples(0.05)
        self._watch()
        chosen = self._choose()
        if chosen.samples or chosen.drops:
            self._plan(chosen)
            self._execute_planned()
        self._beat(State.SERVING)

    def close(self) -> None:
        """Let go of the connections."""
        for part in (self._reader, self._samples, self._writer):
            if part is not None:
                part.close()

    # Taking over ---------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Load, claim, read the heads, and execute again what is planned beyond the checkpoint. Raises Superseded."""
        log = self._daemon.log
        catch_up(log, self._reader, [self._steps], self._handle_step, _CATCH_UP_S)
        positions = self._learner.load(self.ledger, first=not self._ownership.claimed_before)
        claim = self._ownership.claim(log, self._reader, self._handle_step, _CATCH_UP_S)
        heads = announce.take_over(log, claim, timeout_s=_SEND_S)
        self._publisher = Publisher(self._daemon, claim, heads)
        if self._publisher.head < 0:
            self._publisher.publish(self._learner.first_files(), version=0, step=0, plan_offset=-1)
        elif 0 < self._learner.version > self._publisher.head:
            self._publish(*self.ledger.plans[self._learner.version - 1])  # saved by a trainer that could not publish it
        self._open_samples(positions)
        _LOG.info("claimed", epoch=claim.epoch, checkpoint=self._learner.version, planned=self.ledger.steps_planned,
                  announced=self._publisher.head)  # fmt: skip
        self._execute_planned()

    def _open_samples(self, positions: Mapping[int, SamplesPosition]) -> None:
        bounds = self._daemon.log.bounds(self._samples_topic)
        known = {p: positions.get(p, SamplesPosition(b.start, -1)) for p, b in bounds.items()}
        self._backlog = Backlog(self._run_name, self._policy, known)
        self._samples = self._daemon.log.reader({Place(self._samples_topic, p): at.offset for p, at in known.items()})

    # Reading -------------------------------------------------------------------------------------------------------

    def _handle_step(self, envelope: Envelope) -> None:
        record = read_record(envelope)
        counts = self.ledger.take(envelope.offset, record)
        if envelope.offset == self._mine[0]:
            self._mine = (envelope.offset, counts)
        if isinstance(record, Claim):
            self._ownership.saw(envelope, record)

    def _read_samples(self, timeout_s: float) -> int:
        assert self._samples is not None
        envelopes = self._samples.poll(timeout_s)  # a gap ends the process: a plan may name what is gone
        for envelope in envelopes:
            record = read_record(envelope)
            if not isinstance(record, Outcome):
                self._backlog.skip(envelope.partition, envelope.offset)
                continue
            self._backlog.take(envelope.partition, envelope.offset, envelope.time_ms, record)
            key = (envelope.partition, record.closing_offset)
            if self.ledger.named(*key) and key not in self._unexecuted():
                self._backlog.done([key])
        return len(envelopes)

    def _watch(self) -> None:
        """Look for a newer trainer's claim about once a second, also while there is nothing to plan."""
        if time.monotonic() - self._watched_at > _WATCH_S:
            self._watched_at = time.monotonic()
            for envelope in self._reader.poll(0.0):
                self._handle_step(envelope)

    def _unexecuted(self) -> set[tuple[int, int]]:
        """(partition, closing offset) of samples in plans that the weights have not been through."""
        plans = self.ledger.plans[self._learner.version :]
        return {(a.partition, a.closing_offset) for _, plan in plans for a in plan.samples}

    # Planning ------------------------------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return bool(self._table.steps) and self.ledger.steps_planned >= self._table.steps

    def _choose(self) -> Chosen:
        waiting = self._backlog.waiting()
        if self._ended:
            return set_aside(waiting)
        return choose(
            waiting,
            version=self.ledger.steps_planned,
            batch_groups=self._table.batch_groups,
            max_staleness=self._table.max_staleness,
            window=self._table.window_groups or 2 * self._table.batch_groups,
            in_lineage=self.ledger.lineage.holds,
        )

    def _plan(self, chosen: Chosen) -> None:
        """Append the plan and read the ledger up to it: only what counts there is executed."""
        step = self.ledger.steps_planned
        self._append(
            Plan(
                run=self._run_name,
                policy=self._policy,
                epoch=self._ownership.epoch,
                nonce=self._ownership.nonce,
                step=step,
                samples=chosen.samples,
                drops=chosen.drops,
                max_age=chosen.max_age,
                seed=derive_seed(self._daemon.settings.run.seed, self._policy, "step", step),
                config_digest=self._learner.config_digest,
            )
        )
        self._backlog.done((d.partition, d.closing_offset) for d in chosen.drops)
        for reason in {d.reason for d in chosen.drops}:
            _LOG.info("set aside", reason=reason, groups=sum(d.reason == reason for d in chosen.drops), step=step)

    def _append(self, record: Plan | Result) -> None:
        """Append a record and read the ledger up to it. Raises Superseded when it does not count there."""
        ack = self._writer.send(self._steps_topic, 0, encode(record)).result(_SEND_S)
        self._mine = (ack.offset, False)  # others' void records may stand before it: only this one is asked about
        catch_up(self._daemon.log, self._reader, [self._steps], self._handle_step, _SEND_S)
        if self._mine != (ack.offset, True):
            raise Superseded(
                f"{type(record).__name__} of step {record.step} at offset {ack.offset} of {self._steps_topic} does not "
                f"count: epoch {record.epoch} no longer owns it; this trainer ends"
            )

    # Executing -----------------------------------------------------------------------------------------------------

    def _execute_planned(self) -> None:
        """Execute every effective plan beyond the weights, in order."""
        while self._learner.version < self.ledger.steps_planned:
            offset, plan = self.ledger.plans[self._learner.version]
            outcomes = self._gather(plan)
            if plan.config_digest != self._learner.config_digest:
                _LOG.warning("this plan was made under other settings; its step may differ", step=plan.step)
            started = time.monotonic()
            metrics = self._learner.execute(plan, outcomes)
            metrics |= {"step_s": time.monotonic() - started, "idle_s": self._idle_s, "max_age": float(plan.max_age)}
            self._record(plan, metrics)
            self._backlog.done((a.partition, a.closing_offset) for a in plan.samples)
            last = self._is_last(self._learner.version)
            self._publish(offset, plan)
            self._learner.checkpoint(offset, plan, self._backlog.positions(), force=last)
            self._metrics, self._idle_s, self._starved_at = metrics, 0.0, time.monotonic()

    def _gather(self, plan: Plan) -> list[Outcome]:
        """The outcomes of a plan, in its order; a plan of an earlier owner may name some that are not read yet."""
        deadline = time.monotonic() + _CATCH_UP_S
        while missing := [a for a in plan.samples if self._backlog.get(a) is None]:
            if time.monotonic() > deadline or self._daemon.stop.requested:
                raise DeadlineExceeded(
                    f"plan of step {plan.step} names {len(missing)} outcomes that were not found in time (limit {_CATCH_UP_S:g} s), "
                    f"the first at {self._samples_topic}[{missing[0].partition}] offset {missing[0].offset}"
                )
            self._read_samples(0.2)
        return [outcome for a in plan.samples if (outcome := self._backlog.get(a)) is not None]

    def _record(self, plan: Plan, metrics: Mapping[str, float]) -> None:
        digest = self._learner.digest
        if plan.step < self.ledger.steps_done:
            before = self.ledger.results[plan.step].digest
            if before != digest:
                _LOG.warning("executed again with another result", step=plan.step, before=before, now=digest)
            return
        self._append(
            Result(
                run=self._run_name,
                policy=self._policy,
                epoch=self._ownership.epoch,
                nonce=self._ownership.nonce,
                step=plan.step,
                version=plan.step + 1,
                digest=digest,
                metrics=dict(metrics),
            )
        )

    def _is_last(self, version: int) -> bool:
        return bool(self._table.steps) and version >= self._table.steps

    def _publish(self, offset: int, plan: Plan) -> None:
        """Publish the version that this plan made, if it is one to publish and beyond every version announced."""
        version = plan.step + 1
        assert self._publisher is not None and version == self._learner.version
        if version <= self._publisher.head or not (self._is_last(version) or version % self._table.publish_every == 0):
            return
        files, failures = self._learner.files(), 0
        while True:
            try:
                self._publisher.publish(files, version=version, step=plan.step, plan_offset=offset)
                return
            except StoreError as error:  # what is stored already is not sent again
                if not failures:
                    _LOG.warning("the store is away; publishing again", version=version, error=str(error))
                failures += 1
                if self._daemon.stop.wait(min(_BACKOFF_S[0] * 2.0 ** min(failures, 10), _BACKOFF_S[1])):
                    raise
                self._watch()
                self._beat(State.SERVING)

    # Ending --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """A run whose steps are all done sets aside what is left; in any case the weights are checkpointed."""
        if self._ended and self._samples is not None:
            bounds = self._daemon.log.bounds(self._samples_topic)
            deadline = time.monotonic() + _SEND_S
            while any(self._samples.position(Place(self._samples_topic, p)) < b.end for p, b in bounds.items()):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"reading {self._samples_topic} to its end took longer than {_SEND_S:g} s")
                self._read_samples(0.1)
            chosen = self._choose()
            if chosen.drops:
                self._plan(chosen)
        self._learner.checkpoint_now(self._backlog.positions(), self.ledger)
        _LOG.info("ended", version=self._learner.version)

    def _beat(self, state: State) -> None:
        waiting = self._backlog.waiting()
        now = time.monotonic()
        self._idle_s = now - self._starved_at
        self._heart.beat(
            state=state,
            epoch=self._ownership.epoch,
            version=self._learner.version,
            metrics=self._metrics
            | {
                "step": float(self.ledger.steps_done),
                "waiting_groups": float(len(waiting)),
                "wanted_groups": float(self._table.batch_groups),
                "idle_s": self._idle_s,
                "published_version": float(self._publisher.head if self._publisher else -1),
            },
        )
