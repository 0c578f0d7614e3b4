"""DAEMON `offsetrl train`: plans steps from outcomes, executes them at its own pace, publishes weights.

| consumes | samples; steps (its own ledger, and other trainers' claims) |
| produces | claims, plans and results on steps; blobs and manifests in the store; announcements on weights; checkpoints on disk |
| waits for | a batch of kept outcomes |
| after a crash | loads the newest checkpoint whose last plan counts, claims with a higher epoch, executes again the plans beyond it |

Of several trainers of a policy the newest claim wins; the others end with exit code 4 and nothing of theirs is accepted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from infra.config import config_digest
from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.weights import announce
from schemas.records import Plan, State
from schemas.rules.ledger import Ledger
from schemas.rules.planning import Chosen, choose, set_aside
from trainers.backlog import Backlog
from trainers.demonstrations import takes_demonstrations
from trainers.launch import others, place_of
from trainers.own_ledger import OwnLedger
from trainers.publisher import Publisher
from trainers.samples_reader import SamplesReader
from trainers.spent import Spent
from trainers.turns import Turns
from trainers.waiting import Patience, starved_line

if TYPE_CHECKING:
    from trainers.learner import Learner

_SEND_S = 30.0
_LOG = structlog.get_logger("offsetrl.train")


def run(daemon: Daemon) -> int:
    """One rank of a trainer: rank 0 leads; the others do what it does until it says that they may end."""
    table = daemon.table.train
    place = place_of(table, os.environ)
    if place.size == 1:
        return lead(daemon)
    if place.rank:
        return follow(daemon)
    from trainers.ranks import dismissing

    with others(table) as started, dismissing():
        return lead(daemon, started.check)


def follow(daemon: Daemon) -> int:
    """Another rank than 0; it neither reads nor writes the log."""
    from trainers import crew
    from trainers.ranks import join

    digest, ranks = config_digest(daemon.settings, daemon.policy), join(daemon.table.train.rank_timeout_s)
    crew.follow(daemon.table.train, daemon.table.model, digest, ranks, crew.reference_folder(daemon))
    return 0


def lead(daemon: Daemon, check_others: Callable[[], None] = lambda: None) -> int:
    """Train until told to stop; a disturbed log or store means a new claim and the newest checkpoint."""
    heart = Heart(daemon, "train")
    training = Turns(lambda: Trainer(daemon, heart), heart)
    try:
        while not daemon.stop.requested:
            check_others()
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


class Trainer:
    """One claim's worth of training."""

    def __init__(self, daemon: Daemon, heart: Heart) -> None:
        self._daemon, self._heart, self._table = daemon, heart, daemon.table.train
        self._learner = make_learner(daemon)
        self._publisher: Publisher | None = None
        self._idle_s, self._starved_at = 0.0, time.monotonic()
        self._metrics: dict[str, float] = {}
        self._spent, self._patience, self._set_aside = Spent(lambda: time.monotonic()), Patience(), 0
        self._samples = SamplesReader(daemon, self._is_trained)
        self._steps = OwnLedger(daemon)

    @property
    def ledger(self) -> Ledger:
        """What counts on `steps`, as far as it was read."""
        return self._steps.ledger

    @property
    def _backlog(self) -> Backlog:
        return self._samples.backlog

    def turn(self) -> None:
        """Read, plan, execute."""
        self._samples.read(0.05)
        self._steps.watch()
        self._learner.rest()
        if (chosen := self._choose()) is not None:
            self._plan(chosen)
            self._execute_planned()
        self._beat(State.SERVING)
        if self._patience.is_over(self._idle_s) and not self._steps.ended:
            _LOG.info(self._waits_for())

    def _waits_for(self) -> str:
        return starved_line(
            self._idle_s,
            waiting=len(self._backlog.waiting()),
            batch_groups=self._table.batch_groups,
            max_staleness=self._table.max_staleness,
            set_aside=self._set_aside,
            planned=self.ledger.steps_planned,
            published=self._publisher.head if self._publisher else -1,
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._samples.close()
        self._steps.close()
        self._learner.close()

    def take_over(self) -> None:
        """Load, claim, read the heads, and execute again what is planned beyond the checkpoint. Raises Superseded."""
        self._steps.catch_up()
        positions = self._learner.load(self.ledger, first=not self._steps.ownership.claimed_before)
        claim = self._steps.claim()
        heads = announce.take_over(self._daemon.log, claim, timeout_s=_SEND_S)
        self._publisher = Publisher(self._daemon, claim, heads)
        if self._publisher.head < 0:
            self._publisher.publish(self._learner.first_files(), version=0, step=0, plan_offset=-1)
        elif 0 < self._learner.version > self._publisher.head:
            self._publish(*self.ledger.plans[self._learner.version - 1])  # saved by a trainer that could not publish it
        self._samples.open(positions)
        _LOG.info("claimed", epoch=claim.epoch, checkpoint=self._learner.version, planned=self.ledger.steps_planned,
                  announced=self._publisher.head)  # fmt: skip
        self._execute_planned()

    def _is_trained(self, partition: int, closing_offset: int) -> bool:
        """Whether a plan names it, and the weights have been through that plan (or it was set aside there)."""
        key = (partition, closing_offset)
        return self.ledger.named(*key) and key not in self._unexecuted()

    def _unexecuted(self) -> set[tuple[int, int]]:
        """(partition, closing offset) of samples in plans that the weights have not been through."""
        plans = self.ledger.plans[self._learner.version :]
        return {(a.partition, a.closing_offset) for _, plan in plans for a in plan.samples}

    # Planning ------------------------------------------------------------------------------------------------------

    def _choose(self) -> Chosen | None:
        """What the next plan names, which may be nothing where only its time is wanted; None: no plan now."""
        if self._learner.version < self.ledger.steps_planned:
            return None  # a step was left, since this process has to end: its plan comes first, and names what waits
        if self._steps.time_is_up:
            return Chosen((), (), -1)
        chosen = set_aside(self._backlog.waiting()) if self._steps.ended else self._next_step()
        return chosen if chosen.samples or chosen.drops else None

    def _next_step(self) -> Chosen:
        return choose(
            self._backlog.waiting(),
            version=self.ledger.steps_planned,
            batch_groups=self._table.batch_groups,
            max_staleness=self._table.max_staleness,
            window=self._table.window_groups or 2 * self._table.batch_groups,
            in_lineage=self.ledger.lineage.holds,
            takes_given=takes_demonstrations(self._table),
        )

    def _plan(self, chosen: Chosen) -> None:
        """Append the plan and read the ledger up to it: only what counts there is executed."""
        was_over = bool(self._steps.ended)
        tokens = self._backlog.num_trainable(chosen.samples)
        step = self._steps.plan(chosen, self._learner.config_digest, tokens)
        self._backlog.done((d.partition, d.closing_offset) for d in chosen.drops)
        self._set_aside += len(chosen.drops)
        for reason in {d.reason for d in chosen.drops}:
            _LOG.info("set aside", reason=reason, groups=sum(d.reason == reason for d in chosen.drops), step=step)
        if self._steps.ended and not was_over:
            _LOG.info("the last plan of the run", limit=self._steps.ended, step=step)
            if not chosen.samples and step:  # no step follows: the newest version turns out to be the last
                self._publish(*self.ledger.plans[step - 1])
                self._learner.checkpoint_now(self._backlog.positions(), self.ledger)

    # Executing -----------------------------------------------------------------------------------------------------

    def _execute_planned(self) -> None:
        """Execute every effective plan beyond the weights, in order."""
        while self._learner.version < self.ledger.steps_planned:
            offset, plan = self.ledger.plans[self._learner.version]
            with self._spent.on("gather"):
                outcomes = self._samples.gather(plan)
            if plan.config_digest != self._learner.config_digest:
                _LOG.warning("this plan was made under other settings; its step may differ", step=plan.step)
            started = time.monotonic()
            with self._spent.on("step"):
                metrics = self._learner.execute(plan, outcomes, self._meanwhile)
            if metrics is None:
                return
            metrics |= {"step_s": time.monotonic() - started, "idle_s": self._idle_s, "max_age": float(plan.max_age)}
            self._finish(offset, plan, metrics)

    def _finish(self, offset: int, plan: Plan, metrics: dict[str, float]) -> None:
        """Result, publication and checkpoint of a step that was taken."""
        with self._spent.on("record"):
            self._record(plan, metrics)
        self._backlog.done((a.partition, a.closing_offset) for a in plan.samples)
        with self._spent.on("publish"):
            self._publish(offset, plan)
        with self._spent.on("checkpoint"):
            last = self._is_last(self._learner.version)
            self._learner.checkpoint(offset, plan, self._backlog.positions(), force=last)
        metrics |= self._spent.shares() | {"set_aside": float(self._set_aside)}
        self._learner.report(plan.step, metrics)
        self._metrics, self._idle_s, self._starved_at = metrics, 0.0, time.monotonic()
        self._patience, self._set_aside = Patience(), 0

    def _meanwhile(self) -> None:
        """While a step runs: read what comes next, look for a newer trainer, say that this one is alive."""
        self._samples.read(0.0)
        self._steps.watch()
        self._beat(State.SERVING)

    def _record(self, plan: Plan, metrics: Mapping[str, float]) -> None:
        digest = self._learner.digest
        if plan.step < self.ledger.steps_done:
            before = self.ledger.results[plan.step].digest
            if before != digest:
                _LOG.warning("executed again with another result", step=plan.step, before=before, now=digest)
            return
        self._steps.result(plan.step, digest, metrics)

    def _is_last(self, version: int) -> bool:
        return bool(self._steps.ended) and version == self.ledger.steps_planned

    def _publish(self, offset: int, plan: Plan) -> None:
        """Publish the version that this plan made, if it is one to publish and beyond every version announced."""
        version = plan.step + 1
        assert self._publisher is not None and version == self._learner.version
        if version <= self._publisher.head or not (self._is_last(version) or version % self._table.publish_every == 0):
            return
        self._publisher.publish_patiently(
            self._learner.files(), version=version, step=plan.step, plan_offset=offset, meanwhile=self._store_is_away
        )

    def _store_is_away(self) -> None:
        self._steps.watch()
        self._learner.rest()
        self._beat(State.SERVING)

    # Ending --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """A run that has ended sets aside what is left; in any case the weights are checkpointed."""
        if self._steps.ended and self._samples.is_open:
            self._samples.read_to_the_end()
            if (chosen := self._choose()) is not None:
                self._plan(chosen)
        self._learner.checkpoint_now(self._backlog.positions(), self.ledger)
        _LOG.info("ended", version=self._learner.version)

    def _beat(self, state: State) -> None:
        waiting = self._backlog.waiting()
        now = time.monotonic()
        self._idle_s = now - self._starved_at
        self._heart.beat(
            state=state,
            epoch=self._steps.ownership.epoch,
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
