"""A region of its own: a worker there has only its region's bucket, and serves what the mirror brought."""

from __future__ import annotations

import sys
import time

import pytest

from infra import provision, wiring
from infra.demo import recipe
from infra.demo.watch import Watch
from infra.log import Log, Place
from infra.ownership import read_record, start_positions
from infra.settings import Settings
from infra.supervisor import ChildSpec, Supervisor
from infra.weights.fetch import listed
from schemas.names import control_topic, topic
from schemas.records import Heartbeat, State, Trajectory
from support.demo import LIMIT_S, Home

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]

STEPS = 8
CHILDREN = {"train": "", "process": "", "dispatch": "", "mirror": "eu", "rollout": "eu"}


def children(home: Home, run: str) -> list[ChildSpec]:
    specs = []
    for role, region in CHILDREN.items():
        line = [sys.executable, "-m", "infra.cli.main", role, "--config", str(home.folder / f"{run}.toml")]
        line += ["--policy", "alpha", "--name", f"{role}-eu", "--region", region] if region else ["--policy", "alpha"]
        specs.append(ChildSpec(name=role, argv=line, log_path=home.folder / "logs" / run / f"{role}.log"))
    return specs


def records(log: Log, name: str) -> list[object]:
    """Every record of a topic, as it stands."""
    reader = log.reader(start_positions(log, [name]))
    found: list[object] = []
    try:
        for partition, bounds in log.bounds(name).items():
            while reader.position(Place(name, partition)) < bounds.end:
                found += [read_record(envelope) for envelope in reader.poll(0.5)]
    finally:
        reader.close()
    return found


def train_to_the_end(log: Log, settings: Settings, supervisor: Supervisor) -> None:
    watch = Watch(log, settings, time.monotonic())
    deadline = time.monotonic() + LIMIT_S
    try:
        while not watch.done:
            watch.poll(0.2)
            if time.monotonic() > deadline or supervisor.finished():
                said = {name: supervisor.tail(name) for name in CHILDREN}
                pytest.fail(f"step {watch.policies['alpha'].ledger.steps_done}: {supervisor.exits()} {said}")
    finally:
        watch.close()


def test_a_worker_far_away_serves_what_the_mirror_brought(served: Home) -> None:
    run = "regions"
    config = recipe.write(served.folder, run=run, engine="transformers", policies=1, steps=STEPS)
    config.write_text(config.read_text() + '\n[regions.eu]\nbucket = "offsetrl-eu"\n')
    settings = served.settings(run)
    with served.log(run) as log:
        provision.ensure(log, settings)
        with Supervisor(children(served, run)) as supervisor:
            train_to_the_end(log, settings, supervisor)
            supervisor.terminate(["rollout", "dispatch"], 40)
            supervisor.terminate(["mirror", "process", "train"], 40)
        beats = [r for r in records(log, control_topic(run)) if isinstance(r, Heartbeat) and r.role == "rollout"]
        trajectories = [r for r in records(log, topic(run, "alpha", "trajectories")) if isinstance(r, Trajectory)]
    serving = [beat.version for beat in beats if beat.state is State.SERVING]
    assert {beat.region for beat in beats} == {"eu"}
    assert serving == sorted(serving) and len(set(serving)) >= 2, f"versions in use over time: {serving}"
    assert trajectories and {(t.region, t.worker) for t in trajectories} == {("eu", "rollout-eu")}
    mirrored = {name.version for name in listed(wiring.open_store(settings, "eu"), run, "alpha")}
    made_by = {run.version for trajectory in trajectories for run in trajectory.versions}
    assert made_by <= mirrored and len(made_by) >= 3, f"mirrored {mirrored}, served {made_by}"
    served.command("audit", "--config", str(config)).expect()
