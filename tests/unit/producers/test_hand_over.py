"""Workers that leave: what is finished is published, what is not goes to `partials`, and another worker goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.log import Place
from infra.weights.follower import FetchedWeights
from producers.take_over import TakeOver
from producers.transcript import join
from schemas.errors import DeadlineExceeded, DependencyError, EngineError, LogGap, RecordError
from schemas.packing import unpack_floats, unpack_ints
from schemas.records import Finish, Sampling, State, Status, Turn, Version, VersionRun
from schemas.validate import check_trajectory
from support.loop import RUN, append
from support.rollout_scene import Scene, install
from support.samples import claim, partial, request

LONG: dict[str, Any] = {
    "engine": "support.rollout_scene:long_engine", "max_model_len": 64, "partial_tokens": 8, "drain_s": 0.0,
}  # fmt: skip
TOKENS = Sampling(max_tokens=30)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    clock = install(monkeypatch)
    scenes: list[Scene] = []

    def made(rollout: dict[str, Any] | None = None, **options: Any) -> Scene:
        scenes.append(Scene(tmp_path, clock, rollout={**LONG, **(rollout or {})}, **options))
        return scenes[-1]

    yield made
    for scene in scenes:
        scene.worker.close()


def _offsets(scene: Scene, index: int) -> tuple[int, ...]:
    return tuple(at for at, chunk in enumerate(scene.chunks()) if chunk.index == index)


def test_a_second_worker_goes_on_from_the_last_token(make: Callable[..., Scene]) -> None:
    first = make()
    first.ask(0, sampling=TOKENS)
    first.turns(13)
    assert [(c.start, c.end - c.start > 8) for c in first.chunks()] == [(0, True)], "every eight tokens"
    first.worker.hand_over()
    chunks = first.chunks()
    assert first.published() == [] and [chunk.start for chunk in chunks] == [0, chunks[0].end]
    assert first.heart.beats[-1][0] is State.DRAINING
    first.worker.close()

    second = make(log=first.log, name="w1", session="s2", version=Version(1, 4))
    second.ask(0, sampling=TOKENS, attempt=1, first_request_time_ms=77, resume=_offsets(first, 0))
    second.turns(30)
    (found,) = second.published()
    check_trajectory(found, run=RUN, policy="main", partition=0, max_tokens=100)
    handed = join(chunks)
    assert (found.attempt, found.worker, found.session, found.first_request_time_ms) == (1, "w1", "s2", 77)
    assert found.resumed_tokens == handed.num_sampled == 13
    assert found.versions == (VersionRun(1, 0, 13), VersionRun(1, 4, 17))
    assert unpack_ints(found.tokens).tolist()[3:] == [at % 2 for at in range(3, 33)], "no token twice, none missing"
    assert len(unpack_floats(found.logprobs)) == 30
    assert (found.status, found.finish) == (Status.TRUNCATED, Finish.LENGTH)

    alone = make(log=first.log, name="w2", session="s3")
    alone.ask(0, sampling=TOKENS, attempt=2)
    alone.turns(40)
    assert alone.published()[-1].tokens == found.tokens and alone.published()[-1].reward == found.reward


def test_sigkill_loses_no_more_than_what_was_not_in_a_chunk_yet(make: Callable[..., Scene]) -> None:
    first = make()
    first.ask(0, sampling=TOKENS)
    for turn in range(1, 25):
        first.turns(1)
        saved = join(first.chunks()).num_sampled
        assert turn - saved < 8 + 2, "eight tokens and what it takes to look"
    second = make(log=first.log, name="w1", session="s2")
    second.ask(0, sampling=TOKENS, attempt=1, resume=_offsets(first, 0))
    second.turns(30)
    assert second.published()[0].resumed_tokens == saved >= 16


def test_weights_that_do_not_load_end_the_worker_and_others_go_on_with_its_work(
    make: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    first.ask(0, sampling=Sampling(max_tokens=5))
    first.ask(1, sampling=TOKENS)
    first.turns(12)
    monkeypatch.setattr(first.weights, "take", lambda: FetchedWeights(Version(1, 1), tmp_path / "gone", "digest-1"))
    with pytest.raises(EngineError, match="could not be loaded"):
        first.turns(1)
    first.worker.leave()
    assert [found.index for found in first.published()] == [0]
    saved = join([chunk for chunk in first.chunks() if chunk.index == 1]).num_sampled
    assert saved >= 12
    second = make(log=first.log, name="w1", session="s2", version=Version(1, 1))
    second.ask(1, sampling=TOKENS, attempt=1, resume=_offsets(first, 1))
    second.turns(40)
    found = second.published()[-1]
    assert found.resumed_tokens == saved and [run.version for run in found.versions] == [0, 1]


def test_several_workers_in_a_row_hand_the_same_episode_on(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.ask(0, sampling=TOKENS)
    for attempt in range(1, 4):
        scene.turns(7)
        scene.worker.hand_over()
        mine = [at for at, chunk in enumerate(scene.chunks()) if chunk.attempt == attempt - 1]
        assert scene.chunks()[mine[0]].start == 0, "an attempt's chunks hold everything, also what it was given"
        scene = make(log=scene.log, name=f"w{attempt}", session=f"s{attempt + 1}", version=Version(1, attempt))
        scene.ask(0, sampling=TOKENS, attempt=attempt, resume=tuple(mine))
    scene.turns(30)
    (found,) = scene.published()
    assert found.versions == tuple(
        VersionRun(1, version, count) for version, count in ((0, 7), (1, 6), (2, 6), (3, 11))
    )
    assert unpack_ints(found.tokens).tolist()[3:] == [at % 2 for at in range(3, 33)]


def test_what_can_be_finished_in_time_is_not_handed_over(make: Callable[..., Scene]) -> None:
    scene = make({"drain_s": 5.0})
    scene.ask(0, sampling=Sampling(max_tokens=5))
    scene.turns(2)
    scene.worker.hand_over()
    assert len(scene.published()) == 1 and scene.chunks() == []


def test_nothing_is_handed_over_where_it_is_off(make: Callable[..., Scene]) -> None:
    scene = make({"partial_tokens": 0})
    scene.ask(0, sampling=TOKENS)
    scene.turns(20)
    scene.worker.hand_over()
    assert scene.chunks() == [] and scene.published() == []


@pytest.mark.parametrize("resume", [(0, 2), (1,), (7,)], ids=["a gap", "no beginning", "not there"])
def test_chunks_that_cannot_be_used_mean_beginning_anew(make: Callable[..., Scene], resume: tuple[int, ...]) -> None:
    first = make()
    first.ask(0, sampling=TOKENS)
    first.turns(28)
    assert len(first.chunks()) == 3
    second = make({"resume_timeout_s": 0.3}, log=first.log, name="w1", session="s2")
    second.ask(0, sampling=TOKENS, attempt=1, resume=resume)
    second.turns(40)
    (found,) = second.published()
    assert (found.resumed_tokens, found.status) == (0, Status.TRUNCATED)
    assert second.heart.beats[-1][1]["not_resumed"] == 1


def test_while_the_log_takes_no_chunks_none_are_piled_up(make: Callable[..., Scene]) -> None:
    scene = make({"partial_tokens": 1, "concurrency": 2})
    for index in range(2):
        scene.ask(index, sampling=TOKENS)
    scene.turns(1)
    scene.log.stall()
    scene.turns(25)
    assert len(scene.worker._chunks) <= 4 * 2 + 2
    scene.log.resume()
    scene.turns(30)
    assert sorted(t.index for t in scene.published()) == [0, 1]
    for index in range(2):
        join(chunk for chunk in scene.chunks() if chunk.index == index)


def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is_not(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.ask(0, partition=9)
    scene.ask(1, resume=(4, 4))
    scene.ask(2, sampling=Sampling(max_tokens=2))
    scene.turns(6)
    assert [t.index for t in scene.published()] == [2]
    assert scene.heart.beats[-1][1]["refused_requests"] == 2


def test_too_many_calls_that_never_came_back_end_the_worker(make: Callable[..., Scene]) -> None:
    scene = make({"max_stuck_calls": 1, "tool_timeout_s": 3.0, "drain_s": 1.0, "concurrency": 3})
    calls: Any = scene.worker._calls
    for index in range(2):
        calls.hung.add(scene.ask(index).id)
    scene.ask(2, sampling=TOKENS)
    scene.turns(5)
    assert not scene.worker.is_stuck
    scene.clock.now_s += 3.5
    scene.turns(1)
    assert scene.worker.is_stuck
    assert {t.status for t in scene.published()} == {Status.TIMEOUT}
    with pytest.raises(
        DependencyError, match="2 calls into the environment 'sort-digits' never came back, of 1 allowed"
    ):
        scene.worker.hand_over()
    assert [chunk.index for chunk in scene.chunks()][-1:] == [2], "what runs is handed over all the same"


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(make: Callable[..., Scene]) -> Scene:
    """Chunks of g/0/0 at 0 and 2, of another member at 1, something else at 3."""
    scene = make()
    mine: dict[str, Any] = {"group": "g", "index": 0, "partition": 0}
    append(
        scene.log, "partials", partial(**mine), partial(**{**mine, "index": 1}),
        partial(**mine, start=7, turns=(Turn(14, Finish.STOP),)), claim(role="dispatch"),
    )  # fmt: skip
    return scene


def _reader(scene: Scene) -> TakeOver:
    return TakeOver(scene.daemon.log, run=RUN, policy="main", max_tokens=100, timeout_s=0.3)


def _asks(*resume: int, **changes: Any) -> Any:
    return request(**{"group": "g", "index": 0, "partition": 0, "attempt": 1, "resume": resume, **changes})


def test_chunks_are_read_at_their_offsets(shelf: Scene) -> None:
    reader = _reader(shelf)
    for _ in range(2):  # the second time with the reader of the first
        found = reader.read(_asks(0, 2))
        assert (len(found.tokens), found.num_sampled, found.turns) == (
            14,
            6,
            [Turn(5, Finish.STOP), Turn(14, Finish.STOP)],
        )
    reader.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (_asks(1), "asked for by g/0/1"),
        (_asks(3), "a Claim, not a chunk"),
        (_asks(0, attempt=0), "asked for by g/0/0"),
        (_asks(2), "begins at token 7"),
        (_asks(0, partition=1), "took longer|did not come"),
    ],
)
def test_what_is_not_the_attempts_own_is_refused(shelf: Scene, asked: Any, said: str) -> None:
    reader = _reader(shelf)
    with pytest.raises((RecordError, DeadlineExceeded), match=said):
        reader.read(asked)
    assert reader.read(_asks(0)).num_sampled == 3, "and the next reading works"
    reader.close()


def test_removed_chunks_are_a_gap(shelf: Scene) -> None:
    place = Place("demo.main.partials", 0)
    reader = _reader(shelf)
    shelf.log.delete_before(place, 2)
    with pytest.raises(LogGap):
        reader.read(_asks(0, 2))
    append(shelf.log, "partials", partial(group="g", index=0, partition=0))
    assert reader.read(_asks(4)).num_sampled == 3
    reader.close()
