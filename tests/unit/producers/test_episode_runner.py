"""Many episodes on one engine: slow and hanging environments hold up nobody else, and every limit ends in a status."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.settings import RolloutTable
from producers.calls import Calls
from producers.engine import GenerationRequest
from producers.engines.scripted_engine import ScriptedEngine
from producers.environment import Observation, Verdict
from producers.episode import WorkerInfo
from producers.episode_runner import EpisodeRunner
from producers.prompting import PlainPrompts
from producers.transcript import Transcript, join
from schemas.errors import LogGap
from schemas.records import Finish, Partial, Role, Sampling, Segment, Status, Trajectory, Version
from support.loop import Clock, Codec, InlineCalls
from support.samples import request

INFO = WorkerInfo(name="w", session="s", region="", model="m", tokenizer="t", max_model_len=64)
LIMIT_S = 20.0


class Tool:
    """A session of two turns whose calls do what the test says; an environment of such sessions, by item."""

    num_items: int | None = None
    rebuildable = True

    def __init__(self, doing: Callable[[str, int], None] = lambda call, item: None, item: int = 0) -> None:
        self.doing, self.item, self.acts = doing, item, 0

    def payload(self, item: int) -> str:
        return ""

    def open(self, item: int, payload: str, seed: int) -> Any:
        self.doing("open", item)
        return type(self)(self.doing, item)

    @property
    def done(self) -> bool:
        return self.acts == 2

    def observe(self) -> Observation:
        self.doing("observe", self.item)
        return Observation(text="01", role=Role.TOOL) if self.acts else Observation(text="0>")

    def act(self, text: str, truncated: bool) -> None:
        self.doing("act", self.item)
        self.acts += 1

    def verdict(self) -> Verdict:
        self.doing("verdict", self.item)
        return Verdict(status=Status.OK, reward=1.0)


class AsyncTool(Tool):
    """The same, async."""

    async def act(self, text: str, truncated: bool) -> None:  # type: ignore[override]
        if self.item == 7:
            await asyncio.sleep(3600)
        self.acts += 1


class Scene:
    """A runner over the scripted engine; answers are three tokens unless the prompt is being gone on with."""

    def __init__(self, environment: Any, calls: Any, answer: Sequence[int] = (0, 1, 3), **table: Any) -> None:
        self.clock, self.calls = Clock(), calls
        self.engine = ScriptedEngine(
            Version(1, 0), answer=lambda asked: answer, vocab_size=4, stop_ids=(3,), max_model_len=64
        )
        self.reads: list[str] = []
        self.past: Transcript | Exception = Transcript()
        self.runner = EpisodeRunner(
            engine=self.engine, environment=environment, codec=Codec(Path()),
            make_prompts=lambda: PlainPrompts(Codec(Path())), calls=calls, table=RolloutTable(**table),
            clock=self.clock.monotonic, read_past=self._read,
        )  # fmt: skip

    def _read(self, asked: Any) -> Transcript:
        self.reads.append(asked.id)
        if isinstance(self.past, Exception):
            raise self.past
        return self.past

    def start(self, *indices: int, **changes: Any) -> None:
        for index in indices:
            asked = request(index=index, item=index, sampling=Sampling(max_tokens=8), **changes)
            self.runner.start(asked, 5, INFO)

    def until(self, count: int) -> dict[int, Trajectory]:
        """Steps, in real time, until so many have finished."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.runner.finished) < count:
            assert time.monotonic() < deadline, f"{len(self.runner.finished)} of {count} finished"
            self.runner.step()
        return {found.index: found for found in self.runner.finished}


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.close()


def test_episodes_of_several_turns_come_out_whole(calls: Calls) -> None:
    scene = Scene(Tool(), calls)
    scene.start(
        *range(8),
    )
    found = scene.until(8)
    for trajectory in found.values():
        assert (trajectory.status, trajectory.reward, trajectory.finish) == (Status.OK, 1.0, Finish.STOP)
        assert trajectory.segments == (
            Segment(Role.PROMPT, 2), Segment(Role.SAMPLED, 3), Segment(Role.TOOL, 2), Segment(Role.SAMPLED, 3)
        )  # fmt: skip
        assert set(trajectory.timings) == {"episode_s", "environment_s"}
    assert scene.runner.num_sampled == 48 and len(scene.runner) == 0


@pytest.mark.parametrize("hung", ["open", "observe", "act", "verdict"])
def test_a_call_that_hangs_ends_its_own_episode_and_no_other(calls: Calls, hung: str) -> None:
    release = threading.Event()

    def doing(call: str, item: int) -> None:
        if item == 3 and call == hung:
            release.wait(60)

    scene = Scene(Tool(doing), calls, tool_timeout_s=5.0)
    scene.start(*range(6))
    others = scene.until(5)
    assert sorted(others) == [0, 1, 2, 4, 5]
    assert {one.reward for one in others.values()} == {1.0}, "the engine went on with the others"
    scene.clock.now_s += 5.5
    ended = scene.until(6)[3]
    assert (ended.status, ended.reward) == (Status.TIMEOUT, None)
    assert ended.error == f"{hung} took longer than 5 s (tool_timeout_s)"
    assert calls.num_stuck == 1
    release.set()
    scene.start(4)
    assert scene.until(7)[4].reward == 1.0, "and goes on"


def test_an_async_call_that_hangs_ends_its_own_episode(calls: Calls) -> None:
    scene = Scene(AsyncTool(), calls, tool_timeout_s=5.0)
    scene.start(1, 2, 7)
    assert sorted(scene.until(2)) == [1, 2]
    scene.clock.now_s += 5.5
    assert scene.until(3)[7].status is Status.TIMEOUT
    assert calls.num_stuck == 0


@pytest.mark.parametrize(
    ("name", "said"), [("turn_timeout_s", "a turn took"), ("episode_timeout_s", "the episode took")]
)
def test_sampling_that_takes_too_long_ends_the_episode(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(Tool(), InlineCalls(), (0, 1, 3), **{name: 3.0})
    scene.start(0)
    scene.runner.step()
    assert scene.engine.num_running == 1
    scene.clock.now_s += 3.5
    monkeypatch.setattr(scene.engine, "step", lambda: [])
    scene.runner.step()
    (ended,) = scene.runner.finished
    assert (ended.status, ended.reward, ended.error) == (Status.TIMEOUT, None, f"{said} longer than 3 s ({name})")
    assert scene.engine.num_running == 0, "the engine is not kept busy with it"


def test_a_turns_limit_begins_anew_with_each_turn() -> None:
    scene = Scene(Tool(), InlineCalls(), turn_timeout_s=3.0)
    scene.start(0)
    for _ in range(8):
        scene.runner.step()
        scene.clock.now_s += 0.7
    assert [one.status for one in scene.runner.finished] == [Status.OK]


def test_a_prompt_that_the_engine_refuses_is_an_environment_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(asked: GenerationRequest) -> None:
        raise ValueError("token 9 is not in the vocabulary")

    scene = Scene(Tool(), InlineCalls())
    monkeypatch.setattr(scene.engine, "submit", refuses)
    scene.start(0)
    scene.runner.step()
    assert scene.runner.finished[0].status is Status.ENV_ERROR
    assert "not in the vocabulary" in scene.runner.finished[0].error


def test_code_that_exits_does_not_end_the_worker(calls: Calls) -> None:
    def doing(call: str, item: int) -> None:
        if call == "verdict":
            raise SystemExit(1)

    scene = Scene(Tool(doing), calls)
    scene.start(0)
    found = scene.until(1)[0]
    assert (found.status, found.reward, found.error) == (Status.ENV_ERROR, None, "verdict: SystemExit: 1")


# Chunks and carrying on ---------------------------------------------------------------------------------------------


def _chunks(scene: Scene, steps: int) -> list[Partial]:
    for _ in range(steps):
        scene.runner.step()
    return scene.runner.chunks


def test_chunks_are_cut_every_so_many_tokens_and_never_overlap() -> None:
    scene = Scene(Tool(), InlineCalls(), [0, 1, 2, 0, 1, 2, 0, 1], partial_tokens=2)
    scene.start(0)
    chunks = _chunks(scene, 5)
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 4), (4, 6)]
    chunks = _chunks(scene, 20)
    assert [one.end for one in chunks[:-1]] == [one.start for one in chunks[1:]]
    sampled = [sum(s.count for s in one.segments if s.role is Role.SAMPLED) for one in chunks]
    assert set(sampled[:-1]) <= {2, 3}
    assert len(scene.runner.finished) == 1


@pytest.mark.parametrize(("environment", "size"), [(Tool(), 0), (type("Once", (Tool,), {"rebuildable": False})(), 2)])
def test_no_chunks_where_they_are_off_or_nobody_could_use_them(environment: Tool, size: int) -> None:
    scene = Scene(environment, InlineCalls(), partial_tokens=size)
    scene.start(0)
    scene.runner.step()
    scene.runner.leave()
    assert scene.runner.chunks == [] and len(scene.runner) == 0


def test_what_is_left_is_in_the_last_chunk_and_off_the_engine() -> None:
    scene = Scene(Tool(), InlineCalls(), partial_tokens=1000)
    scene.start(0, 1)
    scene.runner.step()
    scene.runner.step()
    scene.runner.leave()
    assert sorted((one.index, one.start, one.end) for one in scene.runner.chunks) == [(0, 0, 4), (1, 0, 4)]
    assert scene.engine.num_running == 0 and len(scene.runner) == 0


def _left(scene: Scene) -> Transcript:
    scene.start(0)
    for _ in range(5):
        scene.runner.step()
    scene.runner.leave()
    return join(scene.runner.chunks)


def test_an_episode_goes_on_where_another_left_it(calls: Calls) -> None:
    past = _left(Scene(Tool(), InlineCalls()))
    assert past.num_sampled == 5 and len(past.turns) == 1
    scene = Scene(Tool(), calls, [3])
    scene.past = past
    scene.start(0, attempt=1, resume=(4, 9))
    found = scene.until(1)[0]
    assert scene.reads == ["g00000042/0/1"]
    assert (found.status, found.resumed_tokens, found.attempt) == (Status.OK, 5, 1)
    assert scene.runner.num_sampled == 1, "only what was missing was sampled"
    alone = Scene(Tool(), calls)
    alone.start(0)
    assert alone.until(1)[0].tokens == found.tokens


@pytest.mark.parametrize("trouble", ["unreadable", "another session", "slow"])
def test_what_cannot_be_gone_on_with_begins_anew(trouble: str) -> None:
    scene = Scene(Tool(), InlineCalls(), resume_timeout_s=4.0)
    if trouble == "unreadable":
        scene.past = LogGap("demo.main.partials", 1, 0, 9)
    elif trouble == "another session":
        assert isinstance(scene.past, Transcript)
        scene.past.read(Role.PROMPT, [1, 1, 1])
    else:
        scene.calls.hung.add("g00000042/0/1")
    scene.start(0, attempt=1, resume=(4,))
    scene.runner.step()
    scene.calls.hung.clear()
    scene.clock.now_s += 20.5
    for _ in range(8):
        scene.runner.step()
    (found,) = scene.runner.finished
    assert (found.status, found.resumed_tokens, found.reward) == (Status.OK, 0, 1.0)
    assert scene.runner.counts["not_rebuilt" if trouble == "another session" else "not_resumed"] == 1


def test_sessions_that_cannot_be_rebuilt_begin_anew_without_reading() -> None:
    scene = Scene(type("Once", (Tool,), {"rebuildable": False})(), InlineCalls())
    scene.start(0, attempt=1, resume=(4,))
    for _ in range(8):
        scene.runner.step()
    assert scene.reads == [] and scene.runner.finished[0].status is Status.OK
