"""The trainer's side of `steps`: its claim, the ledger folded from the topic, and records that count or end it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from infra.daemon import Daemon
from infra.log import Envelope, Place
from infra.ownership import Ownership, catch_up, read_record, start_positions
from schemas.codec import encode
from schemas.errors import BrokerError, Superseded
from schemas.names import topic
from schemas.records import Claim, Plan, Result
from schemas.rules.ledger import Ledger
from schemas.rules.planning import Chosen
from schemas.seeds import derive_seed

SEND_S = 30.0
CATCH_UP_S = 300.0
WATCH_S = 1.0


class OwnLedger:
    """`steps`, read up to what one trainer has written there."""

    def __init__(self, daemon: Daemon) -> None:
        self._log, self._run, self._policy = daemon.log, daemon.settings.run, daemon.policy
        self.topic = topic(daemon.settings.run.name, daemon.policy, "steps")
        self._stop_at = daemon.table.train.stop_at
        self._place = Place(self.topic, 0)
        self.ledger = Ledger()
        self.ownership = Ownership("train", daemon.settings.run.name, daemon.policy, [self._place])
        self._watched_at = 0.0
        self._mine: tuple[int, bool] = (-1, False)
        """Offset of the record written last on steps, and whether it counts there."""
        self._told = (0, 0.0)
        """Append time of the newest record written here, and when it was read."""
        self._writer = self._log.writer()
        try:
            self._reader = self._log.reader(start_positions(self._log, [self.topic]))
        except BrokerError:
            self._writer.close()
            raise

    def close(self) -> None:
        """Let go of the connections."""
        self._reader.close()
        self._writer.close()

    @property
    def ended(self) -> str:
        """Which limit the run has reached; "" while it goes on."""
        return self.ledger.ended(self._stop_at)

    @property
    def time_is_up(self) -> bool:
        """Whether a plan appended now would end a run that goes on.

        By the log's own clock, as far as this trainer's newest record told it: clocks of two machines are never compared.
        Where the log's was set back meanwhile, the plan ends nothing and tells the new time.
        """
        time_ms, read_at = self._told
        now_ms = time_ms + (time.monotonic() - read_at) * 1000
        return not self.ended and bool(self.ledger.ended(self._stop_at, now_ms))

    def catch_up(self, timeout_s: float = CATCH_UP_S) -> None:
        """Read the topic up to its present end. Raises Superseded, DeadlineExceeded."""
        catch_up(self._log, self._reader, [self._place], self._handle, timeout_s)

    def claim(self) -> Claim:
        """Become the owner. Raises Superseded."""
        return self.ownership.claim(self._log, self._reader, self._handle, CATCH_UP_S)

    def watch(self) -> None:
        """Look for a newer trainer's claim about once a second. Raises Superseded."""
        if time.monotonic() - self._watched_at > WATCH_S:
            self._watched_at = time.monotonic()
            for envelope in self._reader.poll(0.0):
                self._handle(envelope)

    def plan(self, chosen: Chosen, config_digest: str, num_tokens: int) -> int:
        """Append the plan of the next step, which is returned. Raises Superseded. `num_tokens`: of its samples, trainable."""
        step = self.ledger.steps_planned
        self.append(
            Plan(
                run=self._run.name,
                policy=self._policy,
                epoch=self.ownership.epoch,
                nonce=self.ownership.nonce,
                step=step,
                samples=chosen.samples,
                drops=chosen.drops,
                max_age=chosen.max_age,
                seed=derive_seed(self._run.seed, self._policy, "step", step),
                config_digest=config_digest,
                num_tokens=num_tokens,
            )
        )
        return step

    def result(self, step: int, digest: str, metrics: Mapping[str, float]) -> None:
        """Append what a step came to. Raises Superseded."""
        self.append(
            Result(
                run=self._run.name,
                policy=self._policy,
                epoch=self.ownership.epoch,
                nonce=self.ownership.nonce,
                step=step,
                version=step + 1,
                digest=digest,
                metrics=dict(metrics),
            )
        )

    def append(self, record: Plan | Result) -> None:
        """Append a record and read the ledger up to it. Raises Superseded when it does not count there."""
        ack = self._writer.send(self.topic, 0, encode(record)).result(SEND_S)
        self._mine = (ack.offset, False)  # others' void records may stand before it: only this one is asked about
        self.catch_up(SEND_S)
        if self._mine != (ack.offset, True):
            raise Superseded(
                f"{type(record).__name__} of step {record.step} at offset {ack.offset} of {self.topic} does not "
                f"count: epoch {record.epoch} no longer owns it; this trainer ends"
            )

    def _handle(self, envelope: Envelope) -> None:
        record = read_record(envelope)
        counts = self.ledger.take(envelope.offset, record, envelope.time_ms)
        if envelope.offset == self._mine[0]:
            self._mine = (envelope.offset, counts)
            self._told = (envelope.time_ms, time.monotonic())
        if isinstance(record, Claim):
            if record.nonce in self.ownership.nonces:
                self._told = (envelope.time_ms, time.monotonic())
            self.ownership.saw(envelope, record)
