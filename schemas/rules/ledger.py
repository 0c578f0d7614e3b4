"""The ledger: a fold over `steps` that says which plans and results count.

A plan counts if its owner holds the claim and it is for the next step; a result counts if its owner holds the claim and
its step is planned and has none yet. A plan without samples only sets outcomes aside, or tells the time, and takes no step.
`trained` means: named by an effective plan that has a result.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.records import Address, Claim, Plan, PlanDrop, Result
from schemas.rules.claims import Claims
from schemas.rules.ending import StopAt, run_ended
from schemas.rules.versions import Lineage


class Ledger:
    """A fold over the records of `steps`, in offset order."""

    def __init__(self) -> None:
        self.claims = Claims()
        self.lineage = Lineage()
        self.plans: list[tuple[int, Plan]] = []
        """(offset, plan) of every effective plan with samples; index = step."""
        self.results: list[Result] = []
        """Effective results; index = step."""
        self.drops: list[PlanDrop] = []
        """Everything that effective plans set aside."""
        self.tokens_planned = 0
        """Trainable tokens of all effective plans."""
        self.started_ms: int | None = None
        """Append time of the first effective claim."""
        self.last_ms: int | None = None
        """Append time of the newest effective plan."""
        self._named: set[tuple[int, int]] = set()
        # By (partition, closing offset), since an outcome may be repeated at several offsets of `samples`.
        self.end = 0
        """Offset behind the last record taken in."""
        self.void = 0
        """Records that did not count."""

    @property
    def steps_planned(self) -> int:
        """Number of effective plans with samples: the next step's number."""
        return len(self.plans)

    @property
    def steps_done(self) -> int:
        """Number of effective results: the version that exists."""
        return len(self.results)

    def named(self, partition: int, closing_offset: int) -> bool:
        """Whether an effective plan has named this outcome, as a sample or as a drop."""
        return (partition, closing_offset) in self._named

    def ended(self, stop_at: StopAt, now_ms: float | None = None) -> str:
        """Which limit the run has reached; "" while it goes on. `now_ms`: as if a plan were appended at that time."""
        last_ms = self.last_ms if now_ms is None else now_ms
        lasted_ms = 0.0 if last_ms is None or self.started_ms is None else last_ms - self.started_ms
        return run_ended(stop_at, steps=self.steps_planned, tokens=self.tokens_planned, lasted_ms=lasted_ms)

    def take(self, offset: int, record: object, time_ms: int) -> bool:
        """Take in a record of `steps`, appended at `time_ms`; True if it counts."""
        self.end = offset + 1
        if isinstance(record, Claim):
            effective = self.claims.claim(record.epoch, record.nonce)
            if effective and self.started_ms is None:
                self.started_ms = time_ms
        elif isinstance(record, Plan):
            effective = self._plan(offset, record)
            if effective:
                self.last_ms = max(time_ms, self.last_ms or 0)
        elif isinstance(record, Result):
            effective = self._result(record)
        else:
            effective = False
        self.void += not effective
        return effective

    def _plan(self, offset: int, plan: Plan) -> bool:
        if not self.claims.owns(plan.epoch, plan.nonce) or plan.step != self.steps_planned:
            return False
        if plan.samples and self.steps_planned != self.steps_done:
            return False  # one step at a time: its own result is missing
        addresses: list[Address | PlanDrop] = [*plan.samples, *plan.drops]
        names = {(a.partition, a.closing_offset) for a in addresses}
        if len(names) != len(addresses) or names & self._named:
            return False
        self._named |= names
        self.drops.extend(plan.drops)
        if plan.samples:
            self.plans.append((offset, plan))
            self.tokens_planned += plan.num_tokens
        return True

    def _result(self, result: Result) -> bool:
        if not self.claims.owns(result.epoch, result.nonce):
            return False
        if result.step != self.steps_done or result.step >= self.steps_planned:
            return False
        self.results.append(result)
        self.lineage.completed(result.step, result.epoch)
        return True

    def trained(self) -> Iterator[tuple[int, Address]]:
        """(step, address) of every outcome that was trained on."""
        for step in range(self.steps_done):
            for address in self.plans[step][1].samples:
                yield step, address

    def awaiting_result(self) -> Iterator[Address]:
        """Outcomes that are planned and not yet trained."""
        for _, plan in self.plans[self.steps_done :]:
            yield from plan.samples
