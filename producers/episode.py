"""One episode as a state machine: it asks its environment and the engine in turns, and ends as one trajectory.

Pure: no engine, environment, clock or log; it says what it wants next and is told what came of it. Token in, token out:
what was sampled is appended as it is and never encoded again; observations of later turns are encoded alone and appended
behind it, so every prompt begins with the one before it. Whatever fails has a status and no reward.

An episode may begin with the transcript of an earlier attempt: its session is built anew by the same acts, each
observation must give the tokens that stand there, and sampling goes on behind the last token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from producers.engine import Generation, GenerationRequest
from producers.environment import Observation, Verdict
from producers.prompting import Prompts, TextCodec
from producers.transcript import Transcript, cut
from schemas.errors import EngineError, RecordError
from schemas.records import REWARDED, Finish, Partial, Request, Role, Status, Trajectory
from schemas.seeds import derive_seed

_MAX_ERROR_CHARS = 2000


class NotRebuilt(Exception):  # no failure: the attempt starts anew
    """The session did not come out as the earlier attempt's transcript says; nothing was sampled yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Who runs the episode and with what; copied into its trajectory."""

    name: str
    session: str
    region: str
    model: str
    tokenizer: str
    """Digest of the tokenizer's files."""
    max_model_len: int
    """Longest prompt plus answer, tokens."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the environment is told, before it is asked for its next observation or its verdict."""

    text: str | None
    """What the model wrote; None before it wrote anything."""
    truncated: bool = False
    last: bool = False
    """There is no room for another turn."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The environment failed: how the episode ends, and why."""

    status: Status
    error: str


Heard = Observation | Verdict | Failure
Wanted = Said | GenerationRequest | Trajectory
"""What an episode wants next: a word with its environment, a generation, or to be published."""


class Episode:
    """One attempt at one request: `start`, then `hear` or `advance`, whichever was wanted, until a Trajectory comes back."""

    def __init__(
        self,
        request: Request,
        *,
        request_time_ms: int,
        codec: TextCodec,
        prompts: Prompts,
        worker: WorkerInfo,
        past: Transcript | None = None,
    ) -> None:
        """`request_time_ms`: append time of the request, which counts unless it names an earlier first request."""
        self.request = request
        self._first_request_time_ms = request.first_request_time_ms or request_time_ms
        self._codec, self._prompts, self._worker = codec, prompts, worker
        self._past = past
        self._own = Transcript()
        self._num_turns, self._turn_start, self._resumed = 0, 0, 0
        self._truncated, self._finish, self._no_room = False, Finish.UNKNOWN, ""
        self._told = (0, 0)
        """Tokens and finished turns that chunks hold already."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens so far."""
        return self._own.num_sampled

    @property
    def num_resumed(self) -> int:
        """Those of them that an earlier attempt sampled."""
        return self._resumed

    def start(self) -> Said:
        """The first thing wanted: the environment's first observation."""
        return Said(None)

    def hear(self, heard: Heard) -> Wanted:
        """Take in what the environment answered. Raises NotRebuilt where it differs from the transcript to go on from."""
        if not isinstance(heard, Observation) and self._is_behind():
            raise NotRebuilt(f"{self.request.id}: the session ended at token {len(self._own.tokens)}: {heard}")
        if isinstance(heard, Failure):
            return self.abandon(heard.status, heard.error or self._no_room)
        if isinstance(heard, Verdict):
            return self._judge(heard)
        try:
            tokens = self._prompts.tokens(heard, self._own.tokens)
        except Exception as error:  # noqa: BLE001 - the edge to texts without tokens and to templates that refuse
            return self.abandon(Status.ENV_ERROR, f"observe: {type(error).__name__}: {error}")
        return self._observe(heard.role, tokens)

    def advance(self, generation: Generation) -> Wanted:
        """Take in a finished generation. Raises EngineError when it contradicts itself."""
        _check(generation)
        self._own.sample(generation.tokens, generation.logprobs, generation.versions, generation.old_kv)
        if generation.finish is Finish.ABORT:
            self._finish = Finish.ABORT
            return self.abandon(Status.CANCELLED, "the engine gave up this generation")
        return self._end_turn(generation.finish)

    def abandon(self, status: Status, error: str) -> Trajectory:
        """End here without a reward: timeout, cancellation, a broken environment."""
        assert status not in REWARDED, status
        return self._end(Verdict(status=status, reward=None, error=error))

    def chunk(self, progress: Generation | None, *, least: int) -> Partial | None:
        """What is new since the last chunk, `progress` included, once it holds `least` sampled tokens; 0: anything at all."""
        if self._is_behind():
            return None  # the earlier attempt's chunks hold more
        held, turns = self._told
        new = self.num_sampled - self._own.sampled_before(held) if held < len(self._own.tokens) else 0
        ahead = max(0, held - len(self._own.tokens))  # told of a generation that is still running
        new += len(progress.tokens) - ahead if progress is not None else 0
        if new < least or (new == 0 and len(self._own.turns) == turns):
            return None
        whole = self._own.with_progress(progress)
        self._told = len(whole.tokens), len(whole.turns)
        request, worker = self.request, self._worker
        return Partial(
            run=request.run,
            policy=request.policy,
            group=request.group,
            index=request.index,
            attempt=request.attempt,
            partition=request.partition,
            worker=worker.name,
            session=worker.session,
            start=held,
            turns=tuple(whole.turns[turns:]),
            **whole.columns(held),
        )

    # Turns ---------------------------------------------------------------------------------------------------------

    def _observe(self, role: Role, tokens: Sequence[int]) -> Wanted:
        room = self._worker.max_model_len - len(self._own.tokens) - len(tokens)
        if room < 1:
            return self._full(len(tokens))
        self._compare(role, tokens)
        self._own.read(role, tokens)
        if not self._own.tokens:
            return self.abandon(
                Status.ENV_ERROR, "observe: the prompt is empty; a model needs at least one token to go on from"
            )
        self._num_turns += 1
        self._turn_start = len(self._own.tokens)
        if (finish := self._recall()) is not None:
            return self._end_turn(finish)
        return self._ask()

    def _ask(self) -> Wanted:
        """The rest of this turn: all of it, unless an earlier attempt has begun it."""
        sampling, taken = self.request.sampling, len(self._own.tokens) - self._turn_start
        most = min(sampling.max_tokens - taken, self._worker.max_model_len - len(self._own.tokens))
        if most < 1:
            return self._end_turn(Finish.LENGTH)
        after = ("after", taken) if taken else ()  # or the numbers of its first tokens would be drawn again
        return GenerationRequest(
            id=f"{self.request.id}/{self._num_turns}",
            prompt=tuple(self._own.tokens),
            sampling=dataclasses.replace(sampling, max_tokens=most),
            seed=derive_seed(self.request.seed, "turn", self._num_turns, *after),
        )

    def _end_turn(self, finish: Finish) -> Said:
        self._own.end_turn(finish)
        self._finish, self._truncated = finish, finish is Finish.LENGTH
        return Said(self._codec.decode(self._own.tokens[self._turn_start :]), self._truncated)

    def _full(self, num_new: int) -> Wanted:
        limit = self._worker.max_model_len
        self._no_room = f"{len(self._own.tokens)} tokens and {num_new} more leave no room within max_model_len {limit}"
        if not self._num_turns:
            return self.abandon(Status.ENV_ERROR, f"observe: the prompt is too long: {self._no_room}")
        # The model had no token left to answer with. The environment hears so once, and may judge what was done before.
        self._truncated = True
        return Said("", truncated=True, last=True)

    # The earlier attempt ----------------------------------------------------------------------------------------------

    def _is_behind(self) -> bool:
        """Whether the earlier attempt's transcript holds more than was built anew so far."""
        past, own = self._past, self._own
        return past is not None and (len(own.tokens), len(own.turns)) < (len(past.tokens), len(past.turns))

    def _compare(self, role: Role, tokens: Sequence[int]) -> None:
        if self._past is None:
            return
        at = len(self._own.tokens)
        there = self._past.tokens[at : at + len(tokens)]
        roles = {segment.role for segment in cut(self._past.segments, at, at + len(there))}
        if there != list(tokens[: len(there)]) or roles - {role}:
            raise NotRebuilt(f"{self.request.id}: the observation at token {at} differs from the earlier attempt's")

    def _recall(self) -> Finish | None:
        """Take over what the earlier attempt sampled in this turn; how it ended, None when it goes on."""
        past, at, done = self._past, len(self._own.tokens), len(self._own.turns)
        if past is None:
            return None
        whole = done < len(past.turns)
        end = past.turns[done].end if whole else len(past.tokens)
        try:
            tokens, logprobs, versions = past.take(at, end)
        except RecordError as error:
            raise NotRebuilt(f"{self.request.id}: {error.detail}") from error
        self._own.sample(tokens, logprobs, versions, past.old_kv)
        self._resumed += len(tokens)
        if not whole:
            self._past = None
        return past.turns[done].finish if whole else None

    # The end ---------------------------------------------------------------------------------------------------------

    def _judge(self, verdict: Verdict) -> Trajectory:
        numbers = (verdict.reward or 0.0, *verdict.parts.values(), *verdict.step_rewards)
        if not all(map(math.isfinite, numbers)):
            return self.abandon(Status.GRADER_ERROR, f"verdict: not a finite number among {numbers}")
        if verdict.status not in REWARDED:
            return self._end(dataclasses.replace(verdict, reward=None))
        if verdict.reward is None:
            return self.abandon(Status.GRADER_ERROR, verdict.error or f"verdict: {verdict.status} without a reward")
        truncated = verdict.status is Status.OK and self._truncated
        return self._end(dataclasses.replace(verdict, status=Status.TRUNCATED if truncated else verdict.status))

    def _end(self, verdict: Verdict) -> Trajectory:
        request, worker = self.request, self._worker
        return Trajectory(
            run=request.run,
            policy=request.policy,
            group=request.group,
            group_size=request.group_size,
            index=request.index,
            attempt=request.attempt,
            partition=request.partition,
            task=request.task,
            environment=request.environment,
            item=request.item,
            seed=request.seed,
            first_request_time_ms=self._first_request_time_ms,
            lifetime_ms=request.lifetime_ms,
            sampling=request.sampling,
            model=worker.model,
            tokenizer=worker.tokenizer,
            status=verdict.status,
            finish=self._finish,
            reward=verdict.reward,
            reward_parts=dict(verdict.parts),
            step_rewards=tuple(verdict.step_rewards),
            error=verdict.error[:_MAX_ERROR_CHARS],
            worker=worker.name,
            session=worker.session,
            region=worker.region,
            resumed_tokens=self._resumed,
            **self._own.columns(),
        )


def _check(generation: Generation) -> None:
    num_tokens, num_versions = len(generation.tokens), sum(run.count for run in generation.versions)
    if not num_tokens == len(generation.logprobs) == num_versions:
        raise EngineError(
            f"generation {generation.id}: {num_tokens} tokens, {len(generation.logprobs)} log-probs and versions of "
            f"{num_versions} tokens; the three must be equal"
        )
    if not all(math.isfinite(logprob) for logprob in generation.logprobs):
        raise EngineError(f"generation {generation.id}: a log-prob is not a finite number; the weights may be broken")
