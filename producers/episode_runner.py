"""Runs many episodes at once between one engine and the sessions of one environment.

Whoever owns it calls `step` in a loop: it hears what environments answered, lets the engine take one step, ends what
takes too long, and never waits for an environment while the engine has work. What is finished lies in `finished`, chunks
of what is not in `chunks`. A time limit that is hit is a status without a reward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

from infra.settings import RolloutTable
from producers.calls import Calls
from producers.conversation import Conversation, Moved
from producers.engine import Engine, GenerationRequest
from producers.environment import Environment, rebuildable
from producers.episode import Episode, Failure, NotRebuilt, Said, Wanted, WorkerInfo
from producers.prompting import Prompts, TextCodec
from producers.transcript import Transcript
from schemas.errors import OffsetRLError
from schemas.records import Partial, Request, Status, Trajectory

_IDLE_S = 0.01
_LOOK_EVERY_S = 1.0
_LOG = structlog.get_logger("offsetrl.rollout")


@dataclasses.dataclass(slots=True)
class _Entry:
    """An episode that runs; times by the runner's clock."""

    request: Request
    time_ms: int
    info: WorkerInfo
    started_s: float
    turn_s: float
    """When its turn began: the last generation was asked for."""
    episode: Episode
    conversation: Conversation
    said: Said | None = None
    """What the environment thinks about."""
    asked_s: float | None = None
    """Since when the environment thinks, or the earlier attempt is read."""
    environment_s: float = 0.0
    generation: str = ""


class EpisodeRunner:
    """The episodes between their beginning and their end. Belongs to the engine's thread."""

    def __init__(
        self,
        *,
        engine: Engine,
        environment: Environment,
        codec: TextCodec,
        make_prompts: Callable[[], Prompts],
        calls: Calls,
        table: RolloutTable,
        clock: Callable[[], float],
        read_past: Callable[[Request], Transcript] | None = None,
    ) -> None:
        """`read_past` gives the transcript that a request asks to go on from; it is called in another thread."""
        self._engine, self._environment, self._codec, self._make_prompts = engine, environment, codec, make_prompts
        self._calls, self._table, self._clock = calls, table, clock
        self._read_past = read_past if rebuildable(environment) else None
        self._chunk_tokens = table.partial_tokens if rebuildable(environment) else 0
        self._entries: dict[str, _Entry] = {}
        self._on_engine: dict[str, _Entry] = {}
        self._steps, self._looked_s = 0, clock()
        self.finished: list[Trajectory] = []
        self.chunks: list[Partial] = []
        self.num_sampled = 0
        """Tokens sampled in finished generations."""
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Episodes that run."""
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        """Whether this attempt runs here."""
        return request_id in self._entries

    def start(self, request: Request, time_ms: int, info: WorkerInfo) -> None:
        """Begin an episode, behind what an earlier attempt left where the request names that."""
        now = self._clock()
        episode, conversation = self._make(request, time_ms, info, None)
        entry = _Entry(request, time_ms, info, now, now, episode, conversation)
        self._entries[request.id] = entry
        if request.resume and self._read_past is not None:
            entry.asked_s = now
            self._calls.start(request.id, functools.partial(_read, self._read_past, request))
        else:
            self._go_on(entry, entry.episode.start())

    def step(self, *, cut_chunks: bool = True) -> None:
        """One engine step and what goes with it. Raises EngineError."""
        self._hear()  # first observations
        if self._on_engine:
            self._sample()
        elif self._entries:
            self._calls.wait(_IDLE_S)
        self._hear()
        self._expire()
        if cut_chunks:
            self._cut_chunks()

    def leave(self) -> None:
        """Cut the last chunk of everything that is not finished, and let go of it."""
        for entry in self._entries.values():
            if self._chunk_tokens:
                self._cut(entry, least=0)
            self._drop(entry)
        self._entries = {}

    # Both sides ------------------------------------------------------------------------------------------------------

    def _make(
        self, request: Request, time_ms: int, info: WorkerInfo, past: Transcript | None
    ) -> tuple[Episode, Conversation]:
        episode = Episode(
            request, request_time_ms=time_ms, codec=self._codec, prompts=self._make_prompts(), worker=info, past=past
        )
        return episode, Conversation(self._environment, request)

    def _begin_again(self, entry: _Entry, past: Transcript | None) -> None:
        entry.episode, entry.conversation = self._make(entry.request, entry.time_ms, entry.info, past)
        self._go_on(entry, entry.episode.start())

    def _go_on(self, entry: _Entry, wanted: Wanted) -> None:
        if isinstance(wanted, Trajectory):
            self._finish(entry, wanted)
        elif isinstance(wanted, Said):
            entry.said, entry.asked_s = wanted, self._clock()
            self._ask(entry, wanted)
        else:
            self._submit(entry, wanted)

    def _ask(self, entry: _Entry, said: Said) -> None:
        talk = entry.conversation
        self._calls.start(entry.request.id, functools.partial(talk.take, said), on_loop=talk.on_loop)

    def _submit(self, entry: _Entry, wanted: GenerationRequest) -> None:
        try:
            self._engine.submit(wanted)
        except ValueError as error:
            self._finish(entry, entry.episode.abandon(Status.ENV_ERROR, f"prompt: {error}"))
            return
        entry.turn_s, entry.generation = self._clock(), wanted.id
        self._on_engine[wanted.id] = entry

    def _finish(self, entry: _Entry, trajectory: Trajectory) -> None:
        del self._entries[entry.request.id]
        timings = {"episode_s": self._clock() - entry.started_s, "environment_s": entry.environment_s}
        self.counts[trajectory.status.value] += 1
        self.counts["resumed_tokens"] += trajectory.resumed_tokens
        self.finished.append(dataclasses.replace(trajectory, timings=timings))

    # The environment's answers ---------------------------------------------------------------------------------------

    def _hear(self) -> None:
        self._calls.settle()
        now = self._clock()
        for key, found in self._calls.finished():
            entry = self._entries[key]
            if entry.asked_s is not None and entry.said is not None:
                entry.environment_s += now - entry.asked_s
            said, entry.asked_s, entry.said = entry.said, None, None
            if said is None:
                self._past(entry, found)
            elif isinstance(found, Moved):
                entry.said, entry.asked_s = said, now
                self._ask(entry, said)
            else:
                self._heard(entry, found)

    def _heard(self, entry: _Entry, found: Any) -> None:
        if isinstance(found, BaseException):  # SystemExit and its like: an Exception is a Failure already
            doing = entry.conversation.doing
            found = Failure(Status.ENV_ERROR, f"{doing}: {type(found).__name__}: {found}")
        try:
            wanted = entry.episode.hear(found)
        except NotRebuilt as error:
            self.counts["not_rebuilt"] += 1
            _LOG.warning("begun anew: the session came out differently", error=str(error))
            self._begin_again(entry, None)
            return
        self._go_on(entry, wanted)

    def _past(self, entry: _Entry, found: Any) -> None:
        """Go on from an earlier attempt, or from the prompt where that cannot be read."""
        if isinstance(found, Transcript):
            self._begin_again(entry, found)
            return
        self.counts["not_resumed"] += 1
        _LOG.warning("begun anew: the earlier attempt cannot be read", attempt=entry.request.id, error=str(found))
        if isinstance(found, BaseException) and not isinstance(found, OffsetRLError):
            raise found
        self._begin_again(entry, None)

    # The engine ------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self._steps += 1
        for generation in self._engine.step():
            entry = self._on_engine.pop(generation.id, None)
            if entry is None:
                continue
            entry.generation = ""
            self.num_sampled += len(generation.tokens)
            self._go_on(entry, entry.episode.advance(generation))

    # Limits ----------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now, table = self._clock(), self._table
        for entry in list(self._entries.values()):
            thinks_s = 0.0 if entry.asked_s is None else now - entry.asked_s
            if now - entry.started_s > table.episode_timeout_s:
                self._time_out(entry, f"the episode took longer than {table.episode_timeout_s:g} s (episode_timeout_s)")
            elif thinks_s > table.tool_timeout_s:
                limit = f"{entry.conversation.doing} took longer than {table.tool_timeout_s:g} s (tool_timeout_s)"
                self._time_out(entry, limit)
            elif now - entry.turn_s > table.turn_timeout_s:
                self._time_out(entry, f"a turn took longer than {table.turn_timeout_s:g} s (turn_timeout_s)")

    def _time_out(self, entry: _Entry, error: str) -> None:
        self._drop(entry)
        if entry.asked_s is not None and entry.said is None:
            entry.asked_s, entry.turn_s = None, self._clock()
            self._past(entry, OffsetRLError(error))
            return
        self._finish(entry, entry.episode.abandon(Status.TIMEOUT, error))

    def _drop(self, entry: _Entry) -> None:
        """Stop what goes on for it, on either side."""
        self._calls.give_up(entry.request.id)
        if entry.generation:
            self._engine.cancel(entry.generation)
            del self._on_engine[entry.generation]
            entry.generation = ""

    # Chunks ----------------------------------------------------------------------------------------------------------

    def _cut_chunks(self) -> None:
        """Look at each episode after about a quarter of a chunk, at one token a step: each holds N sampled tokens or little more."""
        now = self._clock()
        due = self._steps >= max(1, self._chunk_tokens // 4) or now - self._looked_s > _LOOK_EVERY_S
        if not self._chunk_tokens or not due:
            return
        self._steps, self._looked_s = 0, now
        for entry in self._entries.values():
            self._cut(entry, least=self._chunk_tokens)

    def _cut(self, entry: _Entry, *, least: int) -> None:
        progress = self._engine.progress(entry.generation) if entry.generation else None
        if (chunk := entry.episode.chunk(progress, least=least)) is not None:
            self.chunks.append(chunk)


async def _read(read_past: Callable[[Request], Transcript], request: Request) -> Transcript:
    return read_past(request)
