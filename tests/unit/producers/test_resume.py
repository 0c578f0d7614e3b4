"""Unfinished attempts: any cut into chunks, and any number of workers one after the other, give the same trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.conversation import Conversation, Moved
from producers.engine import Generation, GenerationRequest
from producers.environment import Environment, Observation, Verdict
from producers.episode import Episode, Failure, NotRebuilt, Said, Wanted, WorkerInfo
from producers.prompting import PlainPrompts
from producers.transcript import Transcript, cut, join
from schemas.errors import RecordError
from schemas.packing import unpack_ints
from schemas.records import Finish, Partial, Role, Sampling, Segment, Status, Trajectory, VersionRun
from schemas.validate import check_partial, check_trajectory
from support.samples import partial, request

LETTERS = "abcd"
MAX_TOKENS = 6
Plan = list[tuple[list[int], int, bool]]
"""Of each turn: what is sampled, by which version, and whether the answer to it is empty."""


class Letters:
    """One id per letter."""

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)


class Echo:
    """Says back what it hears, reversed, for a number of turns; an environment of one session."""

    num_items: int | None = None

    def __init__(self, plan: Plan, prompt: str = "ab") -> None:
        self.plan, self.heard, self.prompt = plan, list[str](), prompt

    def payload(self, item: int) -> str:
        return ""

    def open(self, item: int, payload: str, seed: int) -> Echo:
        return Echo(self.plan, self.prompt)

    @property
    def done(self) -> bool:
        return len(self.heard) == len(self.plan)

    def observe(self) -> Observation:
        if not self.heard:
            return Observation(text=self.prompt)
        silent = self.plan[len(self.heard) - 1][2]
        return Observation(text="" if silent else self.heard[-1].rstrip("!")[::-1] + "d", role=Role.TOOL)

    def act(self, text: str, truncated: bool) -> None:
        self.heard.append(text + "!" * truncated)

    def verdict(self) -> Verdict:
        return Verdict(status=Status.OK, reward=float(len("".join(self.heard))))


class Worker:
    """Runs one attempt of a plan; a generation gives the plan's tokens from wherever its prompt left off."""

    def __init__(
        self, plan: Plan, attempt: int, past: Transcript | None, environment: Environment | None = None
    ) -> None:
        self.plan = plan
        asked = request(sampling=Sampling(max_tokens=MAX_TOKENS), attempt=attempt, first_request_time_ms=7)
        info = WorkerInfo(
            name=f"w{attempt}", session=f"s{attempt}", region="", model="m", tokenizer="t", max_model_len=500
        )
        self.episode = Episode(
            asked, request_time_ms=7, codec=Letters(), prompts=PlainPrompts(Letters()), worker=info, past=past
        )
        self.talk = Conversation(environment or Echo(plan), asked)
        self.wanted = self._through(self.episode.start())

    def generation(self, count: int | None = None) -> Generation:
        """What the engine has given of this turn: `count` tokens, or all with a finish."""
        assert isinstance(self.wanted, GenerationRequest)
        turn = int(self.wanted.id.rpartition("/")[2]) - 1
        tokens, version, _ = self.plan[turn]
        rest = tokens[len(tokens) - self.left :] if self.left else []
        given = rest if count is None else rest[:count]
        finish = Finish.LENGTH if len(tokens) == MAX_TOKENS else Finish.STOP
        return Generation(
            id=self.wanted.id, tokens=tuple(given), logprobs=tuple(-0.25 * (token + version) for token in given),
            versions=(VersionRun(1, version, len(given)),) if given else (),
            finish=Finish.ABORT if count is not None else finish, old_kv=version == 3,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """Tokens of this turn that the engine has still to give."""
        assert isinstance(self.wanted, GenerationRequest)
        turn = int(self.wanted.id.rpartition("/")[2]) - 1
        taken = MAX_TOKENS - self.wanted.sampling.max_tokens
        return len(self.plan[turn][0]) - taken

    def advance(self) -> None:
        self.wanted = self._through(self.episode.advance(self.generation()))

    def _through(self, wanted: Wanted) -> Wanted:
        while isinstance(wanted, Said):
            heard = _now(self.talk.take(wanted))
            assert not isinstance(heard, Moved)
            wanted = self.episode.hear(heard)
        return wanted


def _now(job: Coroutine[Any, Any, Any]) -> Any:
    with pytest.raises(StopIteration) as stop:
        job.send(None)
    return stop.value.value


def _finished(worker: Worker) -> Trajectory:
    while isinstance(worker.wanted, GenerationRequest):
        worker.advance()
    assert isinstance(worker.wanted, Trajectory)
    return worker.wanted


def _carry_on(plan: Plan, draw: Any) -> tuple[Trajectory, int]:
    """Workers one after the other, each cutting chunks where it likes and ending somewhere; the sampled tokens handed on."""
    past: Transcript | None = None
    for attempt in range(draw(st.integers(1, 3))):
        worker, chunks = Worker(plan, attempt, past), list[Partial]()
        for _ in range(draw(st.integers(0, len(plan)))):
            for count in sorted(draw(st.lists(st.integers(0, MAX_TOKENS), max_size=2))):
                if isinstance(worker.wanted, GenerationRequest) and count < worker.left:
                    _keep(chunks, worker.episode.chunk(worker.generation(count), least=draw(st.integers(1, 3))))
            if isinstance(worker.wanted, GenerationRequest):
                worker.advance()
            _keep(chunks, worker.episode.chunk(None, least=draw(st.integers(1, 3))))
        if not isinstance(worker.wanted, GenerationRequest):
            break
        if draw(st.booleans()):  # SIGTERM; without it, killed
            count = draw(st.integers(0, max(0, worker.left - 1)))
            before = sum(chunk.end - chunk.start for chunk in chunks)
            if count + len(worker.wanted.prompt) >= before:
                _keep(chunks, worker.episode.chunk(worker.generation(count), least=0))
        if chunks:
            repeated = [chunk for chunk in chunks for _ in range(draw(st.integers(1, 2)))]
            past = join(repeated)
    handed = past.num_sampled if past is not None else 0
    return _finished(Worker(plan, 9, past)), handed


def _keep(chunks: list[Partial], chunk: Partial | None) -> None:
    if chunk is not None:
        check_partial(chunk, run="demo", policy="main", partition=1, max_tokens=1000)
        chunks.append(chunk)


TURN = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_TOKENS), st.integers(0, 4), st.booleans())


@given(plan=st.lists(TURN, min_size=1, max_size=4), data=st.data())
def test_whoever_carries_on_the_trajectory_is_the_same(plan: Plan, data: st.DataObject) -> None:
    alone = _finished(Worker(plan, 9, None))
    carried, handed = _carry_on(plan, data.draw)
    assert carried.resumed_tokens == handed
    assert dataclasses.replace(carried, resumed_tokens=0) == alone
    check_trajectory(carried, run="demo", policy="main", partition=1, max_tokens=1000)


@given(data=st.data(), plan=st.lists(TURN, min_size=1, max_size=4))
def test_any_cut_of_a_transcript_joined_is_the_transcript(data: st.DataObject, plan: Plan) -> None:
    whole = Transcript()
    for tokens, version, silent in plan:
        whole.read(Role.PROMPT, [] if silent else [1, 2])
        whole.sample(tokens, [-0.5] * len(tokens), [VersionRun(1, version, len(tokens))], False)
    marks = sorted(data.draw(st.lists(st.integers(0, len(whole.tokens)), max_size=4)))
    chunks = []
    for start, stop in zip([0, *marks], [*marks, len(whole.tokens)], strict=True):
        part = Transcript()
        for segment in cut(whole.segments, 0, stop):
            at = len(part.tokens)
            if segment.role is Role.SAMPLED:
                part.sample(*whole.take(at, at + segment.count), False)
            else:
                part.read(segment.role, whole.tokens[at : at + segment.count])
        chunks.append(partial(start=start, turns=(), **part.columns(start)))
    joined = join(chunks)
    assert joined.columns() == whole.columns()
    assert (joined.tokens, joined.logprobs) == (whole.tokens, whole.logprobs)


def _past(plan: Plan, turns: int, count: int) -> Transcript:
    worker = Worker(plan, 0, None)
    for _ in range(turns):
        worker.advance()
    chunk = worker.episode.chunk(worker.generation(count), least=0)
    assert chunk is not None
    return join([chunk])


PLAN: Plan = [([0, 1, 2], 1, False), ([3, 3, 1, 0], 2, False)]


def test_sampling_goes_on_behind_the_last_token_with_other_random_numbers() -> None:
    whole, worker = Worker(PLAN, 1, None), Worker(PLAN, 1, _past(PLAN, 1, 3))
    whole.advance()
    first, rest = whole.wanted, worker.wanted
    assert isinstance(first, GenerationRequest) and isinstance(rest, GenerationRequest)
    assert rest.prompt == (*first.prompt, 3, 3, 1)
    assert rest.sampling.max_tokens == MAX_TOKENS - 3
    assert rest.seed != first.seed
    assert worker.episode.num_resumed == 6


def test_a_turn_that_is_as_long_as_allowed_is_not_sampled_further() -> None:
    plan: Plan = [([0, 1, 2, 3, 2, 1], 1, False), ([0], 2, False)]
    past = Transcript()
    past.read(Role.PROMPT, [0, 1])
    past.sample(plan[0][0], [-0.5] * 6, [VersionRun(1, 1, 6)], False)
    worker = Worker(plan, 1, past)
    assert isinstance(worker.wanted, GenerationRequest) and worker.wanted.id.endswith("/2")


def test_the_earlier_attempts_chunks_stand_until_more_than_that_was_built_anew() -> None:
    past = _past(PLAN, 1, 2)
    episode = Worker(PLAN, 1, past).episode
    chunk = episode.chunk(None, least=1)
    assert chunk is not None and chunk.start == 0, "a new attempt's chunks hold everything"
    assert unpack_ints(chunk.tokens).tolist() == past.tokens
    asked = Episode(
        request(), request_time_ms=1, codec=Letters(), prompts=PlainPrompts(Letters()), past=past,
        worker=WorkerInfo(name="w", session="s", region="", model="", tokenizer="", max_model_len=50),
    )  # fmt: skip
    assert asked.chunk(None, least=0) is None
    assert isinstance(asked.hear(Observation(text="ab")), Said)
    assert asked.chunk(None, least=0) is None


@pytest.mark.parametrize("prompt", ["ba", "aba", "a"], ids=["other text", "longer text", "shorter text"])
def test_a_session_that_differs_is_not_gone_on_with(prompt: str) -> None:
    with pytest.raises(NotRebuilt):
        Worker(PLAN, 1, _past(PLAN, 1, 2), Echo(PLAN, prompt))


def test_a_session_that_ends_or_fails_early_is_not_gone_on_with() -> None:
    past = _past(PLAN, 1, 2)
    with pytest.raises(NotRebuilt):
        Worker(PLAN, 1, past, Echo(PLAN[:1]))
    worker = Worker(PLAN, 1, None)
    behind = Episode(
        request(), request_time_ms=1, codec=Letters(), prompts=PlainPrompts(Letters()), past=past,
        worker=WorkerInfo(name="w", session="s", region="", model="", tokenizer="", max_model_len=50),
    )  # fmt: skip
    behind.hear(Observation(text="ab"))
    with pytest.raises(NotRebuilt):
        behind.hear(Failure(Status.ENV_ERROR, "act: sandbox lost"))
    failed = worker.episode.hear(Failure(Status.ENV_ERROR, "act: sandbox lost"))
    assert isinstance(failed, Trajectory) and failed.status is Status.ENV_ERROR, "without a past it is what it is"


def test_chunks_that_do_not_belong_together_are_refused() -> None:
    one = partial()
    with pytest.raises(RecordError, match="begins at token 9, not at 7"):
        join([one, partial(start=9, turns=())])
    with pytest.raises(RecordError, match="session s9"):
        join([one, partial(start=7, turns=(), session="s9")])
    with pytest.raises(RecordError, match="g00000042/3/1"):
        join([one, partial(start=7, turns=(), attempt=1)])
    assert join([one, one, partial(start=7, turns=())]).num_sampled == 6
    assert join([]).tokens == []


def test_what_an_observation_says_is_no_sampled_token() -> None:
    past = Transcript()
    past.read(Role.PROMPT, [0, 1, 1])
    with pytest.raises(RecordError, match="prompt"):
        past.take(0, 2)
    assert Segment(Role.PROMPT, 3) in past.segments
