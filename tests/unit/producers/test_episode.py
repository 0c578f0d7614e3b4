"""Episodes: token in, token out; masks; several turns; and no reward for what failed."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.conversation import Conversation, Moved
from producers.engine import Generation, GenerationRequest
from producers.environment import Observation, Verdict
from producers.episode import Episode, Heard, Said, Wanted, WorkerInfo
from producers.prompting import PlainPrompts
from schemas.errors import EngineError
from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from schemas.records import Finish, Request, Role, Sampling, Segment, Status, Trajectory, VersionRun

WORDS = ["<eos>", "a", "b", "c", ">", "<bos>", "d", "ab"]
EOS, AB = 0, 7


class WordCodec:
    """A tokenizer that is not one-to-one: "ab" is one token when encoded, but may be sampled as "a", "b"."""

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        if "!" in text:
            raise ValueError("no token for '!'")
        pieces = text.replace("ab", "\0")
        return [5] * (first and text != "") + [AB if piece == "\0" else WORDS.index(piece) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        kept = tokens[:-1] if tokens and tokens[-1] == EOS else tokens
        return "".join(WORDS[token] for token in kept)


class Talk:
    """An environment session of several turns that can fail at any call."""

    def __init__(
        self, prompts: Sequence[str], verdict: Verdict | None = None, fails: str = "", role: Role = Role.TOOL
    ) -> None:
        self.prompts, self.fails, self.role = list(prompts), fails, role
        self.judged = verdict or Verdict(status=Status.OK, reward=0.5, parts={"x": 1.0})
        self.heard: list[tuple[str, bool]] = []

    @property
    def done(self) -> bool:
        return len(self.heard) >= len(self.prompts)

    def observe(self) -> Observation:
        self._fail("observe")
        text = self.prompts[len(self.heard)]
        return Observation(text=text) if not self.heard else Observation(text=text, role=self.role)

    def act(self, text: str, truncated: bool) -> None:
        self._fail("act")
        self.heard.append((text, truncated))

    def verdict(self) -> Verdict:
        self._fail("verdict")
        return self.judged

    def _fail(self, call: str) -> None:
        if self.fails == call:
            raise RuntimeError("sandbox lost")


def _request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "run": "r", "policy": "p", "epoch": 1, "nonce": "n", "group": "g00000001", "group_size": 4, "index": 2, "attempt": 0,
        "partition": 1, "task": "t", "environment": "e", "item": 9, "payload": "", "seed": 77, "sampling": Sampling(max_tokens=4),
        "min_version": 0, "lifetime_ms": 1000, "first_request_time_ms": 0, "worker": "w", "session": "s",
    }  # fmt: skip
    return Request(**{**fields, **changes})


class One:
    """An environment of one session."""

    num_items: int | None = None

    def __init__(self, session: Talk) -> None:
        self.session = session

    def payload(self, item: int) -> str:
        return ""

    def open(self, item: int, payload: str, seed: int) -> Talk:
        return self.session


class Play:
    """An episode together with its environment, whose answers come at once."""

    def __init__(self, episode: Episode, session: Talk) -> None:
        self.episode, self.talk = episode, Conversation(One(session), episode.request)
        self.abandon, self.chunk = episode.abandon, episode.chunk

    def start(self) -> GenerationRequest | Trajectory:
        return self._through(self.episode.start())

    def advance(self, generation: Generation) -> GenerationRequest | Trajectory:
        return self._through(self.episode.advance(generation))

    def _through(self, wanted: Wanted) -> GenerationRequest | Trajectory:
        while isinstance(wanted, Said):
            heard = _now(self.talk.take(wanted))
            assert not isinstance(heard, Moved)
            wanted = self.episode.hear(heard)
        return wanted


def _now(job: Coroutine[Any, Any, Heard | Moved]) -> Heard | Moved:
    with pytest.raises(StopIteration) as stop:
        job.send(None)
    found: Heard | Moved = stop.value.value
    return found


def _episode(session: Talk, max_model_len: int = 40, **changes: Any) -> Play:
    worker = WorkerInfo(
        name="w", session="s", region="here", model="m", tokenizer="f" * 64, max_model_len=max_model_len
    )
    codec = WordCodec()
    episode = Episode(_request(**changes), request_time_ms=123, codec=codec, prompts=PlainPrompts(codec), worker=worker)
    return Play(episode, session)


def _generation(tokens: Sequence[int], finish: Finish = Finish.STOP, **changes: Any) -> Generation:
    fields: dict[str, Any] = {
        "id": "x", "tokens": tuple(tokens), "logprobs": tuple(-0.5 - t for t in tokens),
        "versions": (VersionRun(1, 3, len(tokens)),), "finish": finish, "old_kv": False,
    }  # fmt: skip
    return Generation(**{**fields, **changes})


def _asked(step: GenerationRequest | Trajectory) -> GenerationRequest:
    assert isinstance(step, GenerationRequest), step
    return step


def _ended(step: GenerationRequest | Trajectory) -> Trajectory:
    assert isinstance(step, Trajectory), step
    return step


def test_one_turn_becomes_one_trajectory() -> None:
    session = Talk(["abc>"])
    episode = _episode(session)
    asked = _asked(episode.start())
    assert asked.prompt == (5, AB, 3, 4)
    assert asked.sampling == Sampling(max_tokens=4)
    ended = _ended(episode.advance(_generation([1, 2, EOS])))
    assert session.heard == [("ab", False)]
    assert (ended.status, ended.finish, ended.reward, dict(ended.reward_parts)) == (
        Status.OK,
        Finish.STOP,
        0.5,
        {"x": 1.0},
    )
    assert unpack_ints(ended.tokens).tolist() == [5, AB, 3, 4, 1, 2, EOS]
    assert unpack_bits(ended.loss_mask, 7).tolist() == [False] * 4 + [True] * 3
    assert unpack_floats(ended.logprobs).tolist() == [-1.5, -2.5, -0.5]
    assert ended.segments == (Segment(Role.PROMPT, 4), Segment(Role.SAMPLED, 3))
    assert ended.versions == (VersionRun(1, 3, 3),)
    assert (ended.id, ended.partition, ended.item, ended.region) == ("g00000001/2/0", 1, 9, "here")


def test_time_of_the_first_request_is_its_own_unless_it_names_an_earlier_one() -> None:
    for named, expected in ((0, 123), (100, 100)):
        episode = _episode(Talk(["a"]), first_request_time_ms=named)
        assert episode.abandon(Status.TIMEOUT, "").first_request_time_ms == expected


def test_later_turns_append_and_never_encode_again_what_was_sampled() -> None:
    session = Talk(["c>", "ab"])
    episode = _episode(session)
    first = _asked(episode.start())
    second = _asked(episode.advance(_generation([1, 2, EOS])))  # "a", "b": encoded anew this would be one token
    assert second.prompt == (*first.prompt, 1, 2, EOS, AB)
    assert second.id != first.id and second.seed != first.seed
    ended = _ended(episode.advance(_generation([6], versions=(VersionRun(1, 4, 1),), old_kv=True)))
    assert session.heard == [("ab", False), ("d", False)]
    assert ended.segments == (
        Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, 3), Segment(Role.TOOL, 1), Segment(Role.SAMPLED, 1)
    )  # fmt: skip
    assert unpack_bits(ended.loss_mask, 8).tolist() == [False] * 3 + [True] * 3 + [False, True]
    assert ended.versions == (VersionRun(1, 3, 3), VersionRun(1, 4, 1))
    assert ended.old_kv


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 3)), min_size=1, max_size=5)
)
def test_whatever_is_sampled_stands_in_the_trajectory_as_it_was(turns: list[tuple[list[int], int]]) -> None:
    episode = _episode(Talk(["abc"] * len(turns), role=Role.OBSERVATION), max_model_len=100)
    step, before = episode.start(), 0
    for tokens, version in turns:
        prompt = _asked(step).prompt
        assert len(prompt) > before
        before = len(prompt) + len(tokens)
        step = episode.advance(_generation(tokens, versions=(VersionRun(1, version, len(tokens)),)))
    ended = _ended(step)
    sampled = [token for tokens, _ in turns for token in tokens]
    tokens_T = unpack_ints(ended.tokens)
    mask_T = unpack_bits(ended.loss_mask, len(tokens_T))
    assert tokens_T[mask_T].tolist() == sampled
    assert unpack_floats(ended.logprobs).tolist() == [-0.5 - token for token in sampled]
    assert sum(run.count for run in ended.versions) == len(sampled)
    assert sum(segment.count for segment in ended.segments) == len(tokens_T)
    assert all(a[:2] != b[:2] for a, b in zip(ended.versions, ended.versions[1:], strict=False))


def test_a_cut_answer_is_truncated_and_rewarded() -> None:
    session = Talk(["c>"])
    episode = _episode(session)
    episode.start()
    ended = _ended(episode.advance(_generation([1, 2, 3, 1], Finish.LENGTH)))
    assert session.heard == [("abca", True)]
    assert (ended.status, ended.finish, ended.reward) == (Status.TRUNCATED, Finish.LENGTH, 0.5)


@pytest.mark.parametrize(
    ("call", "status"), [("observe", Status.ENV_ERROR), ("act", Status.ENV_ERROR), ("verdict", Status.GRADER_ERROR)]
)
def test_a_failing_environment_has_a_status_and_no_reward(call: str, status: Status) -> None:
    episode = _episode(Talk(["c>"], fails=call))
    step = episode.start()
    ended = _ended(step if call == "observe" else episode.advance(_generation([1, EOS])))
    assert (ended.status, ended.reward) == (status, None)
    assert ended.error == f"{call}: RuntimeError: sandbox lost"
    assert len(unpack_ints(ended.tokens)) == (0 if call == "observe" else 5)


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(status=Status.OK, reward=math.nan),
        Verdict(status=Status.OK, reward=math.inf),
        Verdict(status=Status.OK, reward=None),
        Verdict(status=Status.OK, reward=1.0, parts={"x": math.nan}),
        Verdict(status=Status.OK, reward=1.0, step_rewards=(math.nan,)),
        Verdict(status=Status.GRADER_ERROR, reward=0.0),
        Verdict(status=Status.ENV_ERROR, reward=1.0),
        Verdict(status=Status.OK, reward="high"),  # type: ignore[arg-type]
    ],
)
def test_no_reward_without_a_finite_number_and_a_fit_status(verdict: Verdict) -> None:
    episode = _episode(Talk(["c>"], verdict))
    episode.start()
    ended = _ended(episode.advance(_generation([1, EOS])))
    assert ended.reward is None
    assert ended.status in (Status.GRADER_ERROR, Status.ENV_ERROR)


def test_invalid_actions_keep_their_reward() -> None:
    episode = _episode(Talk(["c>"], Verdict(status=Status.INVALID_ACTION, reward=-1.0)))
    episode.start()
    ended = _ended(episode.advance(_generation([1], Finish.LENGTH)))
    assert (ended.status, ended.reward) == (Status.INVALID_ACTION, -1.0)


def test_prompts_that_cannot_be_are_environment_errors() -> None:
    for text, said in (("!", "no token for '!'"), ("", "the prompt is empty"), ("c" * 40, "too long")):
        ended = _ended(_episode(Talk([text])).start())
        assert (ended.status, ended.reward) == (Status.ENV_ERROR, None)
        assert said in ended.error


@pytest.mark.parametrize(("turns", "status", "reward"), [(3, Status.TRUNCATED, 0.5), (4, Status.CANCELLED, None)])
def test_a_full_context_ends_the_episode(turns: int, status: Status, reward: float | None) -> None:
    session = Talk(["ccc", *["c"] * (turns - 1)])
    episode = _episode(session, max_model_len=9)
    assert _asked(episode.start()).sampling.max_tokens == 4
    assert _asked(episode.advance(_generation([1, 1, EOS]))).sampling.max_tokens == 1
    ended = _ended(episode.advance(_generation([1], Finish.LENGTH)))
    assert (ended.status, ended.reward) == (status, reward)
    assert session.heard[-1] == ("", True)
    assert reward is not None or "no room within max_model_len 9" in ended.error
    assert len(unpack_ints(ended.tokens)) == 9


def test_an_episode_can_be_given_up_at_any_time() -> None:
    episode = _episode(Talk(["c>", "a"]))
    episode.start()
    episode.advance(_generation([1, EOS]))
    ended = episode.abandon(Status.TIMEOUT, "longer than 60 s")
    assert (ended.status, ended.reward, ended.error) == (Status.TIMEOUT, None, "longer than 60 s")
    assert len(unpack_floats(ended.logprobs)) == 2
    aborted = _episode(Talk(["c>"]))
    aborted.start()
    assert _ended(aborted.advance(_generation([1], Finish.ABORT))).status is Status.CANCELLED


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": (-1.0,)}, {"versions": ()}, {"logprobs": (-1.0, math.nan)}, {"logprobs": (-1.0, -math.inf)}],
)
def test_generations_that_contradict_themselves_end_the_engine(changes: dict[str, Any]) -> None:
    episode = _episode(Talk(["c>"]))
    episode.start()
    with pytest.raises(EngineError):
        episode.advance(_generation([1, 2], **changes))


@pytest.mark.parametrize("role", [Role.SAMPLED, Role.UNKNOWN])
def test_what_an_environment_says_never_passes_for_the_models(role: Role) -> None:
    episode = _episode(Talk(["c>", "a"], role=role))
    episode.start()
    ended = _ended(episode.advance(_generation([1, EOS])))
    assert (ended.status, ended.reward) == (Status.ENV_ERROR, None)
    assert f"role <Role.{role.name}" in ended.error and "allowed: observation, prompt, tool" in ended.error
    assert ended.segments == (Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, 2))


def test_answers_of_the_wrong_kind_are_failures() -> None:
    class Wordy(Talk):
        def observe(self) -> Observation:
            return "c>"  # type: ignore[return-value]

    ended = _ended(_episode(Wordy(["c>"])).start())
    assert (ended.status, ended.error) == (Status.ENV_ERROR, "observe: TypeError: got str, expected an Observation")
    episode = _episode(Talk(["c>"], Verdict(status=Status.UNKNOWN, reward=1.0)))
    episode.start()
    assert _ended(episode.advance(_generation([1, EOS]))).status is Status.GRADER_ERROR


def test_an_async_session_moves_to_the_event_loop() -> None:
    class Remote(Talk):
        async def act(self, text: str, truncated: bool) -> None:  # type: ignore[override]
            self.heard.append((text, truncated))

    talk = Conversation(One(Remote(["c>"])), _request())
    assert not talk.on_loop
    assert isinstance(_now(talk.take(Said(None))), Moved)
    assert talk.on_loop
    assert _now(talk.take(Said(None))) == Observation(text="c>")
    assert _now(talk.take(Said("ab"))) == Verdict(status=Status.OK, reward=0.5, parts={"x": 1.0})
