"""What the demo's view shows, folded from the log: steps, versions, heartbeats. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from schemas.records import Announcement, Heartbeat, Record, Result, State
from schemas.rules.ending import StopAt
from schemas.rules.ledger import Ledger

ROLES = ("dispatch", "rollout", "process", "train", "eval")


@dataclass(slots=True)
class PolicyProgress:
    """One policy as the log shows it."""

    policy: str
    stop_at: StopAt
    max_staleness: int
    ledger: Ledger = field(default_factory=Ledger)
    published: set[int] = field(default_factory=set)
    beats: dict[str, Heartbeat] = field(default_factory=dict)
    """Newest heartbeat by role/name."""
    newest_ms: int = 0
    """Append time of the newest record seen."""
    times_s: list[float] = field(default_factory=list)
    """When each result was seen, seconds since the demo's start."""
    tokens: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, tokens per second) over time."""
    worker_versions: list[tuple[float, str, int]] = field(default_factory=list)
    """(seconds, worker, version in use) over time."""

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step's batch."""
        return [result.metrics.get("reward_mean", float("nan")) for result in self.ledger.results]

    @property
    def ages(self) -> list[int]:
        """Greatest age in each step's batch."""
        return [plan.max_age for _, plan in self.ledger.plans[: self.ledger.steps_done]]

    @property
    def done(self) -> bool:
        """Whether the run has ended and every step of it has a result; a run without any limit is never done."""
        return bool(self.ledger.ended(self.stop_at)) and self.ledger.steps_done == self.ledger.steps_planned

    @property
    def course(self) -> str:
        """How far the run is: steps, and whatever else limits it."""
        steps, tokens, hours = self.stop_at
        parts = [f"{self.ledger.steps_done}/{steps}" if steps else f"{self.ledger.steps_done}"]
        if tokens:
            parts.append(f"{self.ledger.tokens_planned:,}/{tokens:,} tokens")
        if hours:
            started_ms = self.ledger.started_ms
            lasted_ms = 0 if started_ms is None else max(0, self.newest_ms - started_ms)
            parts.append(f"{lasted_ms / 3_600_000:.2f}/{hours:g} h")
        return ", ".join(parts)

    @property
    def drops(self) -> Counter[str]:
        """Groups left out, by reason, as processors and plans report them."""
        found = Counter(drop.reason for drop in self.ledger.drops)
        for beat in self.beats.values():
            for name, value in beat.metrics.items():
                if name.startswith("dropped:"):
                    found[name.removeprefix("dropped:")] += int(value)
        return found

    def take(self, kind: str, offset: int, record: Record | None, time_ms: int, now_s: float) -> None:
        """Fold a record of `steps`, `weights` or `control` that concerns this policy, appended at `time_ms`."""
        self.newest_ms = max(self.newest_ms, time_ms)
        if kind == "steps":
            if self.ledger.take(offset, record, time_ms) and isinstance(record, Result):
                self.times_s.append(now_s)
        elif isinstance(record, Announcement):
            self.published.add(record.version)
        elif isinstance(record, Heartbeat) and record.policy == self.policy:
            self._beat(record, now_s)

    def _beat(self, beat: Heartbeat, now_s: float) -> None:
        self.beats[f"{beat.role}/{beat.name}"] = beat
        if beat.role == "rollout" and beat.state is State.SERVING:
            self.tokens.append((now_s, beat.metrics.get("tokens_per_s", 0.0)))
            self.worker_versions.append((now_s, beat.name, beat.version))

    def of_role(self, role: str) -> list[Heartbeat]:
        """Newest heartbeats of a role."""
        return [beat for beat in self.beats.values() if beat.role == role]

    def tokens_per_s(self) -> float:
        """Sampled tokens per second of all workers."""
        return sum(beat.metrics.get("tokens_per_s", 0.0) for beat in self.of_role("rollout"))

    def waiting_for(self) -> str:
        """What the next step waits for, in words."""
        if not self.published:
            return "version 0 of the weights (trainer)"
        serving = [beat for beat in self.of_role("rollout") if beat.state is State.SERVING]
        if not serving:
            return "a rollout worker that serves"
        held = sum(int(beat.metrics.get("waiting_requests", 0)) for beat in serving)
        if held and not any(beat.running for beat in serving):  # only weights can hold back requests of an idle worker
            newest = max(beat.version for beat in serving)
            return (
                f"newer weights in a rollout worker: {held} requests need them, version {newest} is in use, "
                f"{max(self.published)} is published"
            )
        waiting = [int(beat.metrics.get("waiting_groups", 0)) for beat in self.of_role("train")]
        return f"kept groups: {sum(waiting)} wait, a batch needs more"
