"""The checks of requests, chunks of unfinished attempts, and evaluations: what is refused and why, and that nothing sound is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import RecordError
from schemas.records import DeadReason, Finish, Sampling, Segment, Turn, VersionRun
from schemas.validate import check_eval, check_partial, check_request, check_trajectory
from support.samples import evaluation, partial, request, trajectory


def _request(**changes: Any) -> None:
    check_request(request(**changes), run="demo", policy="main", partitions=2)


def _partial(max_tokens: int = 100, **changes: Any) -> None:
    check_partial(partial(**changes), run="demo", policy="main", partition=1, max_tokens=max_tokens)


def _eval(**changes: Any) -> None:
    check_eval(evaluation(**changes), run="demo", policy="main")


def test_sound_ones_pass() -> None:
    _request()
    _request(attempt=1, resume=(0, 4, 9))
    _partial()
    _partial(start=20, turns=(), max_tokens=27)
    _partial(tokens=b"", segments=(), versions=(), loss_mask=b"", logprobs=b"", turns=(Turn(0, Finish.LENGTH),))
    _eval()
    _eval(num_failed=64, mean_reward=None, low=None, high=None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"partition": 2}, "partition"),
        ({"partition": -1}, "partition"),
        ({"group": ""}, "group"),
        ({"index": 8}, "index"),
        ({"attempt": -1}, "attempt"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature"),
        ({"resume": (4, 4)}, "resume"),
        ({"resume": (-1,)}, "resume"),
        ({"resume": (9, 4)}, "resume"),
    ],
)
def test_requests_that_nobody_can_serve_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=named):
        _request(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group": ""}, "group"),
        ({"session": ""}, "session"),
        ({"start": -1}, "start"),
        ({"attempt": -1}, "attempt"),
        ({"start": 94}, "tokens"),
        ({"segments": (Segment(partial().segments[0].role, 6),)}, "segments"),
        ({"versions": (VersionRun(1, 6, 2),)}, "versions"),
        ({"logprobs": b""}, "logprobs"),
        ({"loss_mask": b"\xff"}, "loss_mask"),
        ({"turns": (Turn(8, Finish.STOP),)}, "turns"),
        ({"turns": (Turn(5, Finish.STOP), Turn(4, Finish.STOP))}, "turns"),
        ({"start": 6, "turns": (Turn(5, Finish.STOP),)}, "turns"),
        ({"turns": (Turn(5, Finish.ABORT),)}, "turns"),
    ],
)
def test_chunks_that_nobody_could_go_on_from_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=named) as caught:
        _partial(**changes)
    assert caught.value.reason == DeadReason.INVALID


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task": ""}, "task"),
        ({"num_episodes": 0, "num_failed": 0}, "num_episodes"),
        ({"num_failed": 65}, "num_failed"),
        ({"num_failed": -1}, "num_failed"),
        ({"low": 0.6}, "low <= mean"),
        ({"high": 0.4}, "low <= mean"),
        ({"high": None}, "low <= mean"),
        ({"mean_reward": float("nan")}, "low <= mean"),
        ({"num_failed": 64}, "low <= mean"),
        ({"mean_reward": None, "low": None, "high": None}, "low <= mean"),
    ],
)
def test_evaluations_whose_numbers_disagree_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=named):
        _eval(**changes)


@pytest.mark.parametrize("place", [{"run": "other"}, {"policy": "other"}])
def test_what_belongs_elsewhere_is_refused(place: dict[str, Any]) -> None:
    for check in (_request, _partial, _eval):
        with pytest.raises(RecordError) as caught:
            check(**place)
        assert caught.value.reason == DeadReason.WRONG_PLACE


def test_no_more_tokens_are_taken_over_than_were_sampled() -> None:
    home: dict[str, Any] = {"run": "demo", "policy": "main", "partition": 1, "max_tokens": 100}
    check_trajectory(trajectory(resumed_tokens=3), **home)
    for number in (-1, 4):
        with pytest.raises(RecordError, match="resumed_tokens"):
            check_trajectory(trajectory(resumed_tokens=number), **home)


def test_a_chunk_knows_where_it_ends() -> None:
    assert partial().end == 7
    assert replace(partial(), start=5).end == 12
    assert partial().id == "g00000042/3/0"
