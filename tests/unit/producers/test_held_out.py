"""A dispatcher asks for no item that is held out, whatever the curriculum, and closes nothing that was imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producers.asking import Asker
from producers.curricula import CURRICULA
from producers.curriculum import Finished, History
from producers.dispatch_state import DispatchState, Limits
from producers.splits import Split
from schemas.errors import SettingError
from schemas.records import VersionRun
from schemas.rules.ending import StopAt
from support.loop import make_daemon, make_log, make_settings
from support.samples import trajectory

ITEMS, SHARE = 40, 0.25


def make_asker(folder: Path, *, items: int = ITEMS, share: float = SHARE, curriculum: str = "shuffled") -> Asker:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}>"}) for n in range(items)))
    settings = {"file": str(path), "reward": "support.prompt_rewards:exact"}
    task = {"environment": "prompts", "settings": settings, "curriculum": curriculum}
    run = make_settings(folder, task=task, eval={"share": share})
    return Asker(make_daemon(make_log(run), run))


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_no_curriculum_draws_what_is_held_out(tmp_path: Path, curriculum: str) -> None:
    asker, split, history = make_asker(tmp_path, curriculum=curriculum), Split(ITEMS, 5, SHARE), History(100, 1)
    assert split.num_training is not None and split.num_held_out
    trained = {split.training(place) for place in range(split.num_training)}
    drawn = []
    for number in range(3 * ITEMS):
        drawn.append(asker.choose_item(number, history))
        history.saw(0, Finished(number, drawn[-1], (0.5, 1.0), 4.0))
    assert set(drawn) <= trained
    if curriculum in ("shuffled", "in-order"):
        assert sorted(drawn[: len(trained)]) == sorted(trained), "a pass goes through all of them"


def test_a_curriculum_remembers_the_item_it_drew(tmp_path: Path) -> None:
    """Results stand under items, curricula draw places: an item that is solved must rest, and no other."""
    asker, history = make_asker(tmp_path, curriculum="skip-solved"), History(500, 1)
    first = [asker.choose_item(number, History(0, 1)) for number in range(20)]
    solved = first[7]
    for number in (100, 101):
        history.saw(0, Finished(number, solved, (1.0, 1.0), 4.0))
    again = [asker.choose_item(number, history) for number in range(20)]
    assert again[7] != solved and [a for n, a in enumerate(again) if n != 7] == [
        a for n, a in enumerate(first) if n != 7
    ]


def test_nothing_is_held_out_unless_asked_for(tmp_path: Path) -> None:
    asker = make_asker(tmp_path, share=0.0)
    assert sorted(asker.choose_item(n, History(0, 1)) for n in range(ITEMS)) == list(range(ITEMS))


def test_a_share_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="all 1 items of the task are held out"):
        make_asker(tmp_path, items=1, share=0.999).choose_item(0, History(0, 1))


def make_state() -> DispatchState:
    limits = Limits(
        group_size=2,
        capacity_groups=4,
        batch_groups=2,
        max_staleness=1,
        stop_at=StopAt(),
        reissue_after_s=1.0,
        heartbeat_timeout_s=1.0,
    )
    return DispatchState(limits, 2)


@pytest.mark.parametrize(
    ("changes", "strays"),
    [
        ({"group": "import-00ff-1-0", "group_size": 1, "index": 0, "versions": (VersionRun(0, 0, 3),)}, 0),
        ({"group": "import-00ff-1-0", "group_size": 2, "index": 0}, 1),
        ({"group": "g00000007", "group_size": 1, "index": 0}, 1),
    ],
)
def test_an_imported_group_is_no_stray_that_wants_closing(changes: dict[str, Any], strays: int) -> None:
    state = make_state()
    state.saw_trajectory(trajectory(first_request_time_ms=1000, lifetime_ms=1000, **changes), 1500)
    assert len(state.open_strays()) == strays
