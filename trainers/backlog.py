"""What waits to be trained: outcomes read from `samples` by the chain's rule, until a plan names them. No I/O.

Outcomes are held with their packed bytes, as they came; `positions` says from where a restart must read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from schemas.records import KEPT, Address, Outcome
from schemas.rules.chain import NONE, Chain
from schemas.rules.planning import Waiting
from trainers.batching import num_trainable


class SamplesPosition(NamedTuple):
    """Where to read a partition of `samples` from, and the closing offset that precedes that place in the chain."""

    offset: int
    last: int


@dataclass(frozen=True, slots=True)
class Held:
    """A kept outcome and its place in the plans."""

    waiting: Waiting
    outcome: Outcome


class Backlog:
    """A fold over `samples`; keyed by (partition, closing offset)."""

    def __init__(self, run: str, policy: str, positions: Mapping[int, SamplesPosition]) -> None:
        self._run, self._policy = run, policy
        self._chains = {partition: Chain(position.last) for partition, position in positions.items()}
        self._next = {partition: position.offset for partition, position in positions.items()}
        self._held: dict[tuple[int, int], Held] = {}
        self.repeats = 0
        """Outcomes skipped because they do not continue the chain."""

    def take(self, partition: int, offset: int, time_ms: int, outcome: Outcome) -> bool:
        """Take in the outcome at `offset`; True if it counts."""
        self._next[partition] = offset + 1
        if outcome.partition != partition or not self._chains[partition].take(outcome.previous, outcome.closing_offset):
            self.repeats += 1
            return False
        if outcome.kept:
            kept = [member for member in outcome.members if member.disposition == KEPT]
            waiting = Waiting(
                Address(partition, offset, outcome.closing_offset, len(kept)),
                time_ms,
                outcome.oldest_version,
                frozenset((run.epoch, run.version) for member in kept for run in member.versions),
                own=(outcome.source_run, outcome.source_policy) == (self._run, self._policy),
            )
            self._held[(partition, outcome.closing_offset)] = Held(waiting, outcome)
        return True

    def skip(self, partition: int, offset: int) -> None:
        """Pass over a record that is no outcome."""
        self._next[partition] = offset + 1

    def waiting(self, named: Iterable[Address] = ()) -> list[Waiting]:
        """What no plan has named; `named`: addresses of plans that are still to be executed."""
        taken = {(address.partition, address.closing_offset) for address in named}
        return [held.waiting for key, held in self._held.items() if key not in taken]

    def get(self, address: Address) -> Outcome | None:
        """The outcome at an address; None while it is not read."""
        held = self._held.get((address.partition, address.closing_offset))
        return held.outcome if held else None

    def num_trainable(self, addresses: Iterable[Address]) -> int:
        """Trainable tokens of what waits at these addresses."""
        return sum(num_trainable(self._held[(a.partition, a.closing_offset)].outcome) for a in addresses)

    def done(self, addresses: Iterable[tuple[int, int]]) -> None:
        """Forget outcomes, by (partition, closing offset): their step is executed, or a plan set them aside."""
        for key in addresses:
            self._held.pop(key, None)

    def positions(self) -> dict[int, SamplesPosition]:
        """From where a restart must read, so that everything still held is read again."""
        found = {
            partition: SamplesPosition(offset, self._chains[partition].last) for partition, offset in self._next.items()
        }
        for (partition, _), held in self._held.items():
            place = held.waiting.address
            if place.offset < found[partition].offset:
                found[partition] = SamplesPosition(place.offset, held.outcome.previous)
        return found


def from_start(starts: Mapping[int, int]) -> dict[int, SamplesPosition]:
    """Positions of a first start."""
    return {partition: SamplesPosition(offset, NONE) for partition, offset in starts.items()}
