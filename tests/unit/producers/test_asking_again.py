"""Asking once more: at once when a worker is gone, from the last token known, and not without end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producers.resuming import Chunks, num_fruitless
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import Partial, Request, Role, Segment, State, VersionRun
from support.dispatch_scene import Scene
from support.loop import Clock, append
from support.samples import partial


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    clock = Clock()
    monkeypatch.setattr("producers.dispatcher.time", clock)
    found = Scene(
        tmp_path,
        clock,
        dispatch={"group_size": 1, "lifetime_s": 60.0, "reissue_after_s": 10.0},
        train={"steps": 1, "batch_groups": 1},
    )
    found.ready()
    yield found
    found.dispatcher.close()


def chunk(start: int, num_prompt: int, num_sampled: int, **changes: Any) -> Partial:
    """The next chunk of group 0's only member."""
    num = num_prompt + num_sampled
    segments = tuple(Segment(r, n) for r, n in ((Role.PROMPT, num_prompt), (Role.SAMPLED, num_sampled)) if n)
    fields = {
        "group": "g00000000", "index": 0, "partition": 0, "session": "s1", "start": start, "turns": (), "segments": segments,
        "versions": (VersionRun(1, 0, num_sampled),) if num_sampled else (), "tokens": pack_ints(range(num)),
        "loss_mask": pack_bits([n >= num_prompt for n in range(num)]), "logprobs": pack_floats([-1.0] * num_sampled),
    }  # fmt: skip
    return partial(**{**fields, **changes})


def again(scene: Scene) -> list[Request]:
    return [request for request in scene.asked() if request.attempt]


def test_what_a_worker_handed_over_before_it_left_is_gone_on_from(scene: Scene) -> None:
    scene.turn()
    first = scene.asked()[0]
    scene.worker("s2", inbox=1)
    append(scene.log, "partials", chunk(0, 3, 2), chunk(5, 0, 4))
    scene.worker("s1", State.LEFT)
    scene.turn()
    (second,) = again(scene)
    assert (second.attempt, second.session, second.resume) == (1, "s2", (0, 1))
    assert (second.seed, second.item, second.min_version) == (first.seed, first.item, first.min_version)


def test_a_worker_that_drains_gets_nothing_more_and_keeps_what_it_has(scene: Scene) -> None:
    scene.turn()
    scene.worker("s2", inbox=1)
    scene.worker("s1", State.DRAINING)
    scene.turn()
    assert again(scene) == [] and not scene.dispatcher.state.workers["s2"].draining
    assert scene.dispatcher.state.choose_worker(1, avoid="s2").session == "s2"  # type: ignore[union-attr]
    scene.worker("s1", State.LEFT)
    scene.turn()
    assert [request.session for request in again(scene)] == ["s2"]


def test_without_progress_a_living_worker_is_asked_once_more_and_the_group_is_closed_then(scene: Scene) -> None:
    scene.turn()
    for _ in range(3):
        scene.turn(10.5)
        scene.worker("s1")
    assert [request.attempt for request in again(scene)] == [1]
    scene.turn(61.0)
    assert [close.reason for close in scene.closes()] == ["lifetime"]


def test_a_member_that_dies_with_its_workers_is_asked_for_eight_times_more_and_then_closed(scene: Scene) -> None:
    """It may have died in their queues, before it was begun; or it may be what kills them."""
    scene.turn()
    for number in range(2, 13):
        scene.worker(f"s{number}", inbox=1)
        scene.worker(f"s{number - 1}", State.LEFT)
        scene.turn()
    assert [request.attempt for request in again(scene)] == list(range(1, 9))
    scene.turn(61.0)
    assert [close.reason for close in scene.closes()] == ["lifetime"]


def test_a_re_issue_that_goes_on_from_further_tokens_does_not_count(scene: Scene) -> None:
    scene.turn()
    handed = [chunk(0, 3, 2), chunk(0, 3, 4, session="s2", attempt=1), chunk(0, 3, 4, session="s3", attempt=2)]
    for number, record in enumerate(handed):
        append(scene.log, "partials", record)
        scene.worker(f"s{number + 2}", inbox=1)
        scene.worker(f"s{number + 1}", State.LEFT)
        scene.turn()
    assert [(r.attempt, r.resume) for r in again(scene)] == [(1, (0,)), (2, (1,)), (3, (2,))], "the third is in vain"
    scene.worker("s5", inbox=1)
    scene.worker("s4", State.LEFT)
    scene.turn()
    assert len(again(scene)) == 4, "in vain, but its worker is gone"
    scene.turn(61.0)
    assert [close.reason for close in scene.closes()] == ["lifetime"], "a lifetime is the bound, whatever the progress"


def test_a_restart_remembers_chunks_and_attempts(scene: Scene) -> None:
    scene.turn()
    append(scene.log, "partials", chunk(0, 3, 2))
    scene.worker("s2", inbox=1)
    scene.worker("s1", State.LEFT)
    scene.turn()
    append(scene.log, "partials", chunk(0, 3, 5, session="s2", attempt=1))
    scene.restart()
    scene.worker("s3", inbox=2)
    scene.worker("s2", State.LEFT)
    scene.turn()
    assert [(r.attempt, r.resume, r.session) for r in again(scene)] == [(1, (0,), "s2"), (2, (1,), "s3")]


def test_a_member_that_goes_forward_is_not_overdue(scene: Scene) -> None:
    scene.turn()
    scene.worker("s2", inbox=1)
    for number in range(3):
        append(scene.log, "partials", chunk(3 * number, 0, 3))
        for session in ("s1", "s2"):
            scene.worker(session, inbox=int(session[1]) - 1)
        scene.turn(6.0)
    assert again(scene) == [], "18 s, of which none longer than 10 s without a chunk"
    for _ in range(2):
        for session in ("s1", "s2"):
            scene.worker(session, inbox=int(session[1]) - 1)
        scene.turn(6.0)
    assert [(r.session, r.resume) for r in again(scene)] == [("s2", (0, 1, 2))], "elsewhere"


def test_unsound_chunks_are_passed_over(scene: Scene) -> None:
    scene.turn()
    append(scene.log, "partials", chunk(0, 3, 2, logprobs=b""), chunk(0, 3, 2, run="other"))
    scene.worker("s2", inbox=1)
    scene.worker("s1", State.LEFT)
    scene.turn()
    assert [request.resume for request in again(scene)] == [()]


def test_only_chunks_that_follow_one_another_make_a_chain() -> None:
    chunks = Chunks()
    told = [chunk(0, 3, 2), chunk(0, 3, 2), chunk(9, 0, 1), chunk(5, 0, 4), chunk(0, 3, 1, session="t"), chunk(9, 0, 0)]
    assert [chunks.saw(offset, record) for offset, record in enumerate(told)] == [True, False, False, True, True, False]
    assert chunks.best() == (0, 3)
    assert (chunks.num_sampled((0, 3)), chunks.num_sampled((0,)), chunks.num_sampled((99,))) == (6, 2, 0)
    assert num_fruitless({0: (), 1: (0,), 2: (0, 3), 3: (0, 3)}, chunks) == 1


def test_a_prompt_alone_is_nothing_to_go_on_from() -> None:
    chunks = Chunks()
    chunks.saw(0, chunk(0, 3, 0))
    assert chunks.best() == ()
