"""Who is asked for what, and in which order: tags, free places, long ones first while the prediction helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.curriculum import Finished, History
from producers.lengths import Predictions, predicted_length, rank_correlation
from schemas.errors import SettingError
from schemas.records import State
from support.dispatch_scene import Scene
from support.loop import Clock, make_settings


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, **tables: dict[str, object]) -> Scene:
    clock = Clock()
    monkeypatch.setattr("producers.dispatcher.time", clock)
    scene = Scene(folder, clock, **tables)
    scene.ready()
    return scene


def test_only_workers_with_every_tag_required_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = start(tmp_path, monkeypatch, task={"requires": ["gpu", "sandbox"]})
    scene.worker("s2", inbox=1, labels={"tags": "gpu"})
    for _ in range(3):
        scene.turn()
    assert scene.asked() == []
    assert capsys.readouterr().out.count("no live worker has the tags") == 1, "said once"
    scene.worker("s3", inbox=2, labels={"tags": "sandbox,gpu,more"})
    scene.turn()
    assert {request.session for request in scene.asked()} == {"s3"}
    scene.worker("s3", State.LEFT, inbox=2)
    scene.turn()
    assert {request.session for request in scene.asked()} == {"s3"}, "nobody else may go on with it"
    scene.dispatcher.close()


@pytest.mark.parametrize("tag", ["", "a,b", "a b"])
def test_a_tag_is_one_word(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match="tags"):
        make_settings(tmp_path, rollout={"tags": [tag]})


def test_requests_go_where_places_are_free_and_wait_while_none_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = start(tmp_path, monkeypatch, train={"batch_groups": 16}, dispatch={"capacity_groups": 32})
    scene.worker("s1", capacity=3)
    scene.worker("s2", inbox=1, capacity=6)
    scene.turn()
    loads = [sum(r.session == session for r in scene.asked()) for session in ("s1", "s2")]
    assert loads == [6, 12], "two times what each runs at once, groups whole"
    scene.turn()
    assert len(scene.asked()) == 18
    for request in scene.asked()[:3]:
        scene.answer(request)
    scene.turn()
    assert len(scene.asked()) == 21
    scene.dispatcher.close()


def test_long_groups_start_first_once_the_prediction_has_proved_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = start(tmp_path, monkeypatch)
    state = scene.dispatcher.state
    for number, length in enumerate((5.0, 50.0, 20.0, 90.0)):
        state.history.saw(0, Finished(number + 100, number, (), length))
    for number in range(1, 25):
        state.predictions.came(float(number), float(number * 2))
    scene.turn()
    order = list(dict.fromkeys(request.item for request in scene.asked()))
    assert order == [3, 1, 2, 0]
    assert {request.group: request.item for request in scene.asked()} == {f"g{n:08d}": n for n in range(4)}
    scene.dispatcher.close()


def test_groups_start_as_they_come_where_the_prediction_is_worthless() -> None:
    predictions = Predictions()
    for number in range(200):
        predictions.came(float(number % 7), float(number * 37 % 101))
    assert abs(predictions.correlation) < 0.2
    assert predictions.order([1.0, 9.0, 5.0]) == [0, 1, 2]


def test_unknown_lengths_count_as_average_and_equal_ones_keep_their_order() -> None:
    predictions = Predictions()
    for number in range(1, 25):
        predictions.came(float(number), float(number))
    assert predictions.order([2.0, None, 10.0, 6.0]) == [2, 1, 3, 0]
    assert predictions.order([None, None]) == [0, 1]


def test_long_first_ends_earlier_than_as_they_come() -> None:
    """The reason for all this: the last long one keeps everybody waiting."""
    lengths = [1.0] * 12 + [6.0, 6.0]

    def makespan(order: list[int]) -> float:
        free = [0.0, 0.0, 0.0]
        for place in order:
            slot = free.index(min(free))
            free[slot] += lengths[place]
        return max(free)

    predictions = Predictions()
    for number in range(1, 25):
        predictions.came(float(number), float(number))
    assert makespan(predictions.order(list(lengths))) == 8.0 < makespan(list(range(14))) == 10.0


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30))
def test_rank_correlation_is_bounded_symmetric_and_blind_to_scale(pairs: list[tuple[int, int]]) -> None:
    rho = rank_correlation([(float(a), float(b)) for a, b in pairs])
    assert -1.0 - 1e-9 <= rho <= 1.0 + 1e-9
    assert rank_correlation([(float(b), float(a)) for a, b in pairs]) == pytest.approx(rho)
    assert rank_correlation([(float(a) ** 3, 2.0**b) for a, b in pairs]) == pytest.approx(rho)
    assert rank_correlation([(float(a), float(-b)) for a, b in pairs]) == pytest.approx(-rho)


def test_predictions_are_means_over_the_item_alone() -> None:
    history = History(memory=10, partitions=2)
    history.saw(0, Finished(0, 1, (), 4.0))
    history.saw(1, Finished(1, 1, (), 8.0))
    history.saw(1, Finished(3, 2, (), 100.0))
    history.saw(1, Finished(5, 1, (), 0.0))
    assert (predicted_length(1, history), predicted_length(9, history)) == (6.0, None), "0: no member came"


def test_unknown_curricula_and_settings_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match="did you mean 'skip-solved'"):
        start(tmp_path, monkeypatch, task={"curriculum": "skip-solve"})
