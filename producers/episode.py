"""One episode as a state machine: it asks for generations, takes them in, and ends as one trajectory.

Pure: no engine, clock or log. Token in, token out: what was sampled is appended as it is and never encoded again;
observations of later turns are encoded alone and appended behind it, so every prompt begins with the one before it.
Whatever fails has a status and no reward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from producers.engine import Generation, GenerationRequest
from producers.environment import Session, Verdict
from schemas.errors import EngineError
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import REWARDED, Finish, Request, Role, Segment, Status, Trajectory, VersionRun
from schemas.seeds import derive_seed

_MAX_ERROR_CHARS = 2000


class TextCodec(Protocol):
    """What an episode needs of a tokenizer (`producers.tokenizer.Tokenizer`)."""

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        """Ids of a text; `first` adds what a model expects before a prompt. Raises ValueError for what has no id."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled ids, without one closing end token."""
        ...


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


class Episode:
    """One attempt at one request: `start`, then `advance` with each generation until a Trajectory comes back."""

    def __init__(
        self, request: Request, *, request_time_ms: int, session: Session, codec: TextCodec, worker: WorkerInfo
    ) -> None:
        """`request_time_ms`: append time of the request, which counts unless it names an earlier first request."""
        self.request = request
        self._first_request_time_ms = request.first_request_time_ms or request_time_ms
        self._session = session
        self._codec = codec
        self._worker = worker
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._segments: list[Segment] = []
        self._versions: list[VersionRun] = []
        self._turn = 0
        self._old_kv = False
        self._truncated = False
        self._finish = Finish.UNKNOWN

    @property
    def num_sampled(self) -> int:
        """Sampled tokens so far."""
        return len(self._logprobs)

    def start(self) -> GenerationRequest | Trajectory:
        """The first generation wanted, or the trajectory of an episode that ended before any."""
        return self._ask()

    def advance(self, generation: Generation) -> GenerationRequest | Trajectory:
        """Take in a finished generation. Raises EngineError when it contradicts itself."""
        _check(generation)
        if generation.tokens:
            self._append(Role.SAMPLED, generation.tokens)
        self._logprobs.extend(generation.logprobs)
        for run in generation.versions:
            _extend(self._versions, run)
        self._old_kv |= generation.old_kv
        self._finish = generation.finish
        if generation.finish is Finish.ABORT:
            return self.abandon(Status.CANCELLED, "the engine gave up this generation")
        self._truncated = generation.finish is Finish.LENGTH
        try:
            self._session.act(self._codec.decode(generation.tokens), self._truncated)
        except Exception as error:  # noqa: BLE001 - the edge to the environment: any failure of it is one status
            return self.abandon(Status.ENV_ERROR, _said("act", error))
        return self._ask()

    def abandon(self, status: Status, error: str) -> Trajectory:
        """End here without a reward: timeout, cancellation, a broken environment."""
        assert status not in REWARDED, status
        return self._end(Verdict(status=status, reward=None, error=error))

    def _ask(self) -> GenerationRequest | Trajectory:
        try:
            if self._session.done:
                return self._judge()
            observation = self._session.observe()
            tokens = self._codec.encode(observation.text, first=not self._tokens)
        except Exception as error:  # noqa: BLE001 - the edge to the environment and to texts that have no tokens
            return self.abandon(Status.ENV_ERROR, _said("observe", error))
        room = self._worker.max_model_len - len(self._tokens) - len(tokens)
        if room < 1:
            return self._no_room(len(tokens))
        if tokens:
            self._append(observation.role, tokens)
        if not self._tokens:
            return self.abandon(
                Status.ENV_ERROR, "observe: the prompt is empty; a model needs at least one token to go on from"
            )
        return self._next(room)

    def _next(self, room: int) -> GenerationRequest:
        self._turn += 1
        sampling = self.request.sampling
        return GenerationRequest(
            id=f"{self.request.id}/{self._turn}",
            prompt=tuple(self._tokens),
            sampling=dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            seed=derive_seed(self.request.seed, "turn", self._turn),
        )

    def _no_room(self, num_new: int) -> Trajectory:
        limit = self._worker.max_model_len
        said = f"{len(self._tokens)} tokens and {num_new} more leave no room within max_model_len {limit}"
        if self._turn == 0:
            return self.abandon(Status.ENV_ERROR, f"observe: the prompt is too long: {said}")
        # The model had no token left to answer with. The environment hears so once, and may judge what was done before.
        self._truncated = True
        try:
            self._session.act("", truncated=True)
            is_done = self._session.done
        except Exception as error:  # noqa: BLE001 - the edge to the environment: any failure of it is one status
            return self.abandon(Status.ENV_ERROR, _said("act", error))
        return self._judge() if is_done else self.abandon(Status.CANCELLED, said)

    def _judge(self) -> Trajectory:
        try:
            verdict = self._session.verdict()
            reward = None if verdict.reward is None else float(verdict.reward)
            parts = {str(name): float(part) for name, part in verdict.parts.items()}
            steps = tuple(float(step) for step in verdict.step_rewards)
        except Exception as error:  # noqa: BLE001 - the edge to the grader: any failure of it is one status
            return self.abandon(Status.GRADER_ERROR, _said("verdict", error))
        if verdict.status not in REWARDED:
            reward = None
        elif not all(math.isfinite(number) for number in (reward or 0.0, *parts.values(), *steps)):
            return self.abandon(Status.GRADER_ERROR, f"verdict: not a finite number among {reward}, {parts}, {steps}")
        elif reward is None:
            return self.abandon(Status.GRADER_ERROR, verdict.error or f"verdict: {verdict.status} without a reward")
        status = Status.TRUNCATED if verdict.status is Status.OK and self._truncated else verdict.status
        return self._end(Verdict(status=status, reward=reward, parts=parts, step_rewards=steps, error=verdict.error))

    def _append(self, role: Role, tokens: Iterable[int]) -> None:
        before = len(self._tokens)
        self._tokens.extend(tokens)
        count = len(self._tokens) - before
        if self._segments and self._segments[-1].role is role:
            self._segments[-1] = Segment(role, self._segments[-1].count + count)
        else:
            self._segments.append(Segment(role, count))

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
            old_kv=self._old_kv,
            versions=tuple(self._versions),
            segments=tuple(self._segments),
            tokens=pack_ints(self._tokens),
            loss_mask=pack_bits([s.role is Role.SAMPLED for s in self._segments for _ in range(s.count)]),
            logprobs=pack_floats(self._logprobs),
        )


def _extend(runs: list[VersionRun], run: VersionRun) -> None:
    """Append a run of tokens, joined with the last one where both are of the same weights."""
    if run.count == 0:
        return
    if runs and (runs[-1].epoch, runs[-1].version) == (run.epoch, run.version):
        runs[-1] = VersionRun(run.epoch, run.version, runs[-1].count + run.count)
    else:
        runs.append(run)


def _check(generation: Generation) -> None:
    num_tokens, num_versions = len(generation.tokens), sum(run.count for run in generation.versions)
    if not num_tokens == len(generation.logprobs) == num_versions:
        raise EngineError(
            f"generation {generation.id}: {num_tokens} tokens, {len(generation.logprobs)} log-probs and versions of "
            f"{num_versions} tokens; the three must be equal"
        )
    if not all(math.isfinite(logprob) for logprob in generation.logprobs):
        raise EngineError(f"generation {generation.id}: a log-prob is not a finite number; the weights may be broken")


def _said(call: str, error: Exception) -> str:
    return f"{call}: {type(error).__name__}: {error}"
