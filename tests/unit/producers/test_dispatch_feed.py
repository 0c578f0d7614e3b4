"""From where a dispatcher reads, and what counts of what it reads there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.log import Committed, Place
from infra.ownership import Ownership
from producers.trails import from_text
from schemas.names import commit_group, topic
from schemas.records import Claim, Request
from support.dispatch_scene import Scene
from support.loop import POLICY, RUN, Clock, append, said
from support.samples import announcement, outcome, request

GROUP = commit_group(RUN, POLICY, "dispatch")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    clock = Clock()
    monkeypatch.setattr("producers.dispatcher.time", clock)
    found = Scene(
        tmp_path, clock, task={"memory_groups": 0}, train={"batch_groups": 8}, dispatch={"capacity_groups": 8}
    )
    yield found
    found.dispatcher.close()


def places(scene: Scene, kind: str) -> list[Place]:
    name = topic(RUN, POLICY, kind)
    return [Place(name, partition) for partition in scene.log.bounds(name)]


def stored(scene: Scene, kind: str) -> list[Committed]:
    return list(scene.log.committed(GROUP, places(scene, kind)).values())


def run_through(scene: Scene) -> None:
    """Every group asked for so far completes and is dropped by a filter."""
    for wanted in scene.asked():
        scene.answer(wanted)
    last = {0: -1, 1: -1}
    for group in sorted({wanted.group for wanted in scene.asked()}):
        partition = int(group[1:]) % 2
        record = outcome(
            group=group, partition=partition, previous=last[partition], closing_offset=last[partition] + 3,
            disposition="zero-spread",
        )  # fmt: skip
        last[partition] += 3
        append(scene.log, "samples", record, partition=partition)
    scene.dispatcher._catch_up()


def test_positions_are_stored_before_anything_is_asked_and_then_follow_what_has_ended(scene: Scene) -> None:
    assert [entry.offset for entry in stored(scene, "requests")] == [1, 1, 1], "behind its claim"
    scene.ready()
    scene.turn()
    scene.turn(3.0)
    assert [entry.offset for entry in stored(scene, "requests")] == [1, 1, 1], "the oldest request of a running group"
    run_through(scene)
    scene.dispatcher._feed.store()
    assert stored(scene, "requests")[0].offset == scene.log.bounds(topic(RUN, POLICY, "requests"))[0].end
    for entry, wanted in zip(
        stored(scene, "samples"), scene.log.bounds(topic(RUN, POLICY, "samples")).values(), strict=True
    ):
        assert entry.offset == wanted.end
    note = from_text(stored(scene, "samples")[0].note, {"last": int, "kept": int, "dropped": int})
    assert note == {"floor": 8, "last": 11, "kept": 0, "dropped": 4}


def test_what_a_zombie_wrote_behind_the_stored_position_does_not_count(scene: Scene) -> None:
    scene.ready()
    scene.restart()
    run_through(scene)
    scene.dispatcher._feed.store()
    old = next(r for r in said(scene.log, "requests") if isinstance(r, Claim) and r.epoch == 1)
    append(scene.log, "requests", _request(old))
    scene.restart()
    assert scene.dispatcher.state.running == 0, "epoch 1 was superseded by epoch 2 before this position"


def _request(claim: Claim) -> Request:
    return request(epoch=claim.epoch, nonce=claim.nonce, group="g00000099", partition=1)


def test_without_the_note_of_the_owner_it_would(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(Ownership, "resume", lambda self, place, epoch, nonce: None)
    with pytest.raises(AssertionError, match="superseded by epoch 2"):
        test_what_a_zombie_wrote_behind_the_stored_position_does_not_count(scene)


def test_a_topic_that_is_shorter_than_the_position_is_read_whole(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    place = places(scene, "requests")[0]
    entry = scene.log.committed(GROUP, [place])[place]
    scene.log.commit(GROUP, {place: replace(entry, offset=10_000)})
    scene.restart()
    assert (scene.dispatcher.state.running, scene.dispatcher.state.next_number) == (8, 8)


@pytest.mark.parametrize("note", ["", "{}", "[]", '{"floor":"1","epoch":0,"nonce":""}'])
def test_a_note_that_is_not_ours_is_not_believed(scene: Scene, note: str) -> None:
    scene.ready()
    scene.turn()
    place = places(scene, "requests")[0]
    scene.log.commit(GROUP, {place: Committed(scene.log.bounds(place.topic)[0].end, note)})
    scene.restart()
    assert scene.dispatcher.state.running == 8


def test_outcomes_go_on_where_retention_took_the_beginning_of_their_chain(scene: Scene) -> None:
    scene.ready()
    scene.turn()
    run_through(scene)
    place = places(scene, "samples")[0]
    scene.log.delete_before(place, scene.log.bounds(place.topic)[0].end - 1)
    scene.log.commit(GROUP, {place: Committed(0, "")})
    scene.restart()
    state = scene.dispatcher.state
    assert state.dropped == 1 + scene.log.bounds(place.topic)[1].end
    assert state.next_number == 8, "numbers without any trace are not known to be unused"


def test_a_full_read_of_a_whole_log_finds_what_was_left_out(scene: Scene) -> None:
    """A dispatcher that died between two writes left out group 1; its number is the next."""
    append(scene.log, "weights", announcement(version=0))
    claim = next(r for r in said(scene.log, "requests") if isinstance(r, Claim))
    append(scene.log, "requests", replace(_request(claim), group="g00000000", partition=0))
    append(scene.log, "requests", replace(_request(claim), group="g00000002", partition=0))
    for place in scene.dispatcher._feed.places:
        if place.topic.rpartition(".")[2] in ("requests", "trajectories", "partials", "samples"):
            scene.log.commit(GROUP, {place: Committed(0, "")})
    scene.restart()
    assert scene.dispatcher.state.next_number == 1
