"""The tokens of an attempt as they come, who wrote each, and how they are cut into chunks and joined again.

Pure. T = tokens, S = sampled tokens. Any cut of a transcript into chunks, joined, gives the same transcript.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from producers.engine import Generation
from schemas.errors import RecordError
from schemas.packing import pack_bits, pack_floats, pack_ints, unpack_floats, unpack_ints
from schemas.records import DeadReason, Finish, Partial, Role, Segment, Turn, VersionRun

Run = TypeVar("Run", Segment, VersionRun)


class Transcript:
    """Columns that only grow; `turns` holds the sampled turns that are over."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.segments: list[Segment] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionRun] = []
        self.turns: list[Turn] = []
        self.old_kv = False

    @property
    def num_sampled(self) -> int:
        """S."""
        return len(self.logprobs)

    def read(self, role: Role, tokens: Iterable[int]) -> None:
        """Append what the model reads."""
        before = len(self.tokens)
        self.tokens.extend(tokens)
        _extend(self.segments, Segment(role, len(self.tokens) - before))

    def sample(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Iterable[VersionRun], old_kv: bool
    ) -> None:
        """Append what the model wrote."""
        self.read(Role.SAMPLED, tokens)
        self.logprobs.extend(logprobs)
        for run in versions:
            _extend(self.versions, run)
        self.old_kv |= old_kv

    def end_turn(self, finish: Finish) -> None:
        """What was sampled last is a whole turn."""
        self.turns.append(Turn(len(self.tokens), finish))

    def with_progress(self, progress: Generation | None) -> Transcript:
        """A copy that also holds what a running generation has been given so far."""
        copy = Transcript()
        copy.tokens, copy.segments, copy.logprobs = list(self.tokens), list(self.segments), list(self.logprobs)
        copy.versions, copy.turns, copy.old_kv = list(self.versions), list(self.turns), self.old_kv
        if progress is not None:
            copy.sample(progress.tokens, progress.logprobs, progress.versions, progress.old_kv)
        return copy

    def sampled_before(self, position: int) -> int:
        """Number of sampled tokens among the first `position`."""
        return sum(segment.count for segment in cut(self.segments, 0, position) if segment.role is Role.SAMPLED)

    def take(self, start: int, stop: int) -> tuple[list[int], list[float], list[VersionRun]]:
        """Tokens, log-probs and version runs of a stretch that was sampled throughout. Raises RecordError if it was not."""
        roles = [segment.role for segment in cut(self.segments, start, stop)]
        if any(role is not Role.SAMPLED for role in roles):
            raise RecordError(DeadReason.INVALID, f"tokens {start} to {stop} were sampled and {', '.join(roles)}")
        first, last = self.sampled_before(start), self.sampled_before(stop)
        return self.tokens[start:stop], self.logprobs[first:last], cut(self.versions, first, last)

    def columns(self, start: int = 0) -> dict[str, Any]:
        """The packed fields, of a trajectory or a chunk, from position `start` on."""
        first, segments = self.sampled_before(start), cut(self.segments, start, len(self.tokens))
        return {
            "old_kv": self.old_kv,
            "versions": tuple(cut(self.versions, first, self.num_sampled)),
            "segments": tuple(segments),
            "tokens": pack_ints(self.tokens[start:]),
            "loss_mask": pack_bits([s.role is Role.SAMPLED for s in segments for _ in range(s.count)]),
            "logprobs": pack_floats(self.logprobs[first:]),
        }


def join(chunks: Iterable[Partial]) -> Transcript:
    """The transcript that sound chunks of one attempt, in their order, hold together; one that stands twice counts once.

    Raises RecordError where they are of several attempts or sessions, or where a part is missing between them.
    """
    joined = Transcript()
    seen: dict[tuple[int, int, tuple[Turn, ...]], Partial] = {}
    for chunk in chunks:
        first = next(iter(seen.values()), chunk)
        if (chunk.id, chunk.session) != (first.id, first.session):
            raise RecordError(
                DeadReason.WRONG_PLACE,
                f"a chunk of {chunk.id} by session {chunk.session} among those of {first.id} by {first.session}",
            )
        if (key := (chunk.start, chunk.end, chunk.turns)) in seen:
            continue
        seen[key] = chunk
        if chunk.start != (have := len(joined.tokens)):
            raise RecordError(DeadReason.INVALID, f"chunk of {chunk.id}: begins at token {chunk.start}, not at {have}")
        _add(joined, chunk)
    return joined


def _add(joined: Transcript, chunk: Partial) -> None:
    joined.tokens.extend(unpack_ints(chunk.tokens).tolist())
    joined.logprobs.extend(unpack_floats(chunk.logprobs).tolist())
    for segment in chunk.segments:
        _extend(joined.segments, segment)
    for run in chunk.versions:
        _extend(joined.versions, run)
    joined.turns.extend(chunk.turns)
    joined.old_kv |= chunk.old_kv


def cut(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """The runs of the stretch from `start` up to `stop`.

    >>> cut([VersionRun(1, 6, 2), VersionRun(1, 7, 3)], 1, 3)
    [VersionRun(epoch=1, version=6, count=1), VersionRun(epoch=1, version=7, count=1)]
    """
    found: list[Run] = []
    at = 0
    for run in runs:
        count = min(stop, at + run.count) - max(start, at)
        if count > 0:
            found.append(run._replace(count=count))
        at += run.count
    return found


def _extend(runs: list[Run], run: Run) -> None:
    """Append a run, joined with the last one where both are of the same kind."""
    if run.count == 0:
        return
    if runs and runs[-1][:-1] == run[:-1]:
        runs[-1] = run._replace(count=runs[-1].count + run.count)
    else:
        runs.append(run)
