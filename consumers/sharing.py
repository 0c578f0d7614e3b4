"""A processor's share of its policy's partitions: follows the heartbeats on `<run>.control`.

The rule is `schemas.rules.shares`. No consumer group is joined, so nobody waits for a rebalance, and a processor that is
slow, frozen or cut off is never in the way: others take its partitions over, and what it still writes has no effect.
"""

from __future__ import annotations

import time

from infra.log import Log, Place, Reader
from infra.ownership import read_record
from schemas.errors import DeadlineExceeded, LogGap
from schemas.names import control_topic
from schemas.rules.shares import Members, shares

ROLE = "process"


class Sharing:
    """Who shares the work, as this session sees it. Belongs to the thread of the processor's loop."""

    def __init__(
        self, log: Log, run: str, policy: str, session: str, *, timeout_s: float, patience_s: float, poll_s: float = 0.0
    ) -> None:
        self.session = session
        self._log, self._place = log, Place(control_topic(run), 0)
        self._members = Members(ROLE, policy, int(timeout_s * 1000))
        self._patience_s, self._poll_s = patience_s, poll_s
        self._position = 0
        self._reader: Reader | None = None
        self.num_alive = 1

    def share(self, num_partitions: int) -> set[int]:
        """The partitions that are this session's now. Raises BrokerError, DeadlineExceeded; a later call goes on."""
        if self._reader is None:
            self._start()
        else:
            self._look(self._reader, self._poll_s)
        # This session works whatever the log says of it: it may be too young to be heard, or have been silent.
        alive = self._members.alive() | {self.session}
        self.num_alive = len(alive)
        return shares(num_partitions, alive)[self.session]

    def close(self) -> None:
        """Let go of the reader; what was learnt stays."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _start(self) -> None:
        """Read on from where this session stopped, up to the end that the topic has now."""
        bounds = self._log.bounds(self._place.topic)[self._place.partition]
        reader = self._reader = self._log.reader({self._place: max(self._position, bounds.start)})
        deadline_s = time.monotonic() + self._patience_s
        while reader.position(self._place) < bounds.end:
            if self._look(reader, min(1.0, self._patience_s)):
                deadline_s = time.monotonic() + self._patience_s
            elif time.monotonic() > deadline_s:
                self.close()
                raise DeadlineExceeded(
                    f"{self._place.topic}[0]: no heartbeat came before offset {bounds.end} for {self._patience_s:g} s"
                )

    def _look(self, reader: Reader, timeout_s: float) -> int:
        """Fold what came; how many records that were."""
        try:
            envelopes = reader.poll(timeout_s)
        except LogGap:  # retention took old heartbeats: their senders beat again, or are gone
            return 0
        for envelope in envelopes:
            self._members.take(read_record(envelope), envelope.time_ms)
            self._position = envelope.offset + 1
        return len(envelopes)
