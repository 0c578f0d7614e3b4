"""`offsetrl replay`: a finished run's trajectories through another estimator and a trainer, the source untouched."""

from __future__ import annotations

import json

import pytest

from infra import wiring
from infra.log import Committed, Log, Place
from infra.weights.fetch import listed
from schemas.names import KINDS, commit_group, topic
from support.demo import Finished, Home

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]


def positions(log: Log, run: str) -> dict[str, object]:
    """Bounds of every topic of a run, and what its processor has committed."""
    names = [topic(run, "alpha", kind) for kind in KINDS if topic(run, "alpha", kind) in log.topics()]
    places = [Place(topic(run, "alpha", "trajectories"), partition) for partition in (0, 1)]
    committed: dict[Place, Committed] = log.committed(commit_group(run, "alpha", "process"), places)
    return {"bounds": {name: log.bounds(name) for name in names}, "committed": committed}


def test_another_estimator_and_a_trainer_without_any_worker(served: Home, finished: Finished) -> None:
    report = served.folder / "replayed.json"
    with served.log("first") as log:
        before = positions(log, "first")
        arguments = ("--into", "second-look", "--advantage", "rloo", "--steps", "3", "--policy", "alpha")
        done = served.command("replay", "--config", str(finished.config), *arguments, "--json", str(report)).expect()
        assert positions(log, "first") == before
        assert log.bounds(topic("second-look", "alpha", "trajectories"))[0].end == 0, "it made none of its own"
    found = json.loads(report.read_text())
    assert found["ok"] is True and found["steps"] == 3 and (found["unaccounted"], found["twice"]) == (0, 0)
    assert found["produced"] == finished.figures["produced"], "the same trajectories, accounted for once more"
    assert "books close" in done.out
    store = wiring.open_store(served.settings("first"))
    assert [version.version for version in listed(store, "second-look", "alpha")] == [3, 2, 1, 0]


def test_what_cannot_be_replayed_is_said(served: Home, finished: Finished) -> None:
    config = str(finished.config)
    itself = served.command("replay", "--config", config, "--into", "first").expect(2)
    assert "is the run itself" in itself.out
    absent = served.command("replay", "--config", config, "--into", "x", "--set", 'run.name="never-ran"').expect(2)
    assert "nothing to replay" in absent.out
