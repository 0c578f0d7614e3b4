"""Chunks of one member's unfinished attempts: which of them the next attempt goes on from, and whether that is progress. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.records import Partial, Role


@dataclass(slots=True)
class _Chain:
    """Chunks of one attempt by one session, each beginning where the one before it ends."""

    attempt: int
    offsets: list[int] = field(default_factory=list)
    end: int = 0
    num_sampled: int = 0


class Chunks:
    """What stands on `partials` for one member of a group."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, str], _Chain] = {}
        self._sampled: dict[int, int] = {}

    def saw(self, offset: int, partial: Partial) -> bool:
        """A chunk stands at `offset`; True if it goes on where its attempt's chunks ended. Repeats change nothing."""
        chain = self._chains.setdefault((partial.attempt, partial.session), _Chain(partial.attempt))
        if partial.start != chain.end or (partial.end == partial.start and not partial.turns):
            return False
        chain.offsets.append(offset)
        chain.end = partial.end
        chain.num_sampled += sum(s.count for s in partial.segments if s.role is Role.SAMPLED)
        self._sampled[offset] = chain.num_sampled
        return True

    def best(self) -> tuple[int, ...]:
        """Offsets of the chain with most sampled tokens, of equal ones the newest attempt's; () where nothing was sampled."""
        chain = max(self._chains.values(), key=lambda c: (c.num_sampled, c.attempt), default=None)
        return tuple(chain.offsets) if chain is not None and chain.num_sampled else ()

    def num_sampled(self, resume: tuple[int, ...]) -> int:
        """Sampled tokens that an attempt with this `Request.resume` goes on from; 0 where its chunks are not known."""
        return self._sampled.get(resume[-1], 0) if resume else 0


def num_fruitless(resumes: Mapping[int, tuple[int, ...]], chunks: Chunks) -> int:
    """Re-issues that went on from no more sampled tokens than the one before them.

    `resumes`: attempt -> what its request named. Only these count against "ask once more, then close": a long episode
    that workers on borrowed machines carry on bit by bit is not given up for being handed over often.

    >>> num_fruitless({0: (), 1: ()}, Chunks()), num_fruitless({0: (), 1: (), 2: ()}, Chunks())
    (1, 2)
    """
    most, fruitless = 0, 0
    for attempt in sorted(resumes):
        sampled = chunks.num_sampled(resumes[attempt])
        fruitless += attempt > 0 and sampled <= most
        most = max(most, sampled)
    return fruitless
