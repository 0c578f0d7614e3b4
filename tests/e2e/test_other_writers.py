"""A run that another release began: today's release reads all of it and goes on, once that one's schemas are learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra import audit_command, drops_command, preflight, provision, wiring
from infra.audit import Audit
from infra.audit_command import audit_policy
from infra.cli.status import daemons
from infra.memory_log import MemoryLog
from infra.settings import Settings
from schemas import codec
from support.generations import publish, published, rewritten
from support.loop import POLICY, RUN, make_daemon
from support.processor_scenes import effective
from support.silence import silence
from support.simulation import Simulation, install
from trainers.own_ledger import OwnLedger


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence():
        yield


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing learnt yet."""
    monkeypatch.setattr(codec, "_READERS", dict(codec._READERS))


@pytest.fixture
def sim(tmp_path: Path) -> Simulation:
    """A run with half of its steps done, and every process of it gone."""
    found = Simulation(3, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, found)
        _staff(found)
        found.until(lambda: found.watcher.ledger.steps_done >= 5)
        found.end()
    return found


def _staff(sim: Simulation) -> None:
    for role, name in (("train", ""), ("process", ""), ("dispatch", ""), ("rollout", "w0"), ("rollout", "w1")):
        sim.start(role, name)


def _steps(log: MemoryLog, settings: Settings) -> int:
    """Steps that a trainer finds when it starts."""
    own = OwnLedger(make_daemon(log, settings))
    try:
        own.catch_up(5.0)
        return own.ledger.steps_done
    finally:
        own.close()


def _again(log: MemoryLog, settings: Settings) -> Partitions:
    """A processor of a derived run that has read all of the trajectories."""
    table, run = settings.policies[POLICY], "again"
    source = {"run": RUN, "policy": POLICY}
    derived = settings.model_copy(update={
        "run": settings.run.model_copy(update={"name": run}),
        "policies": {POLICY: table.model_copy(update={"source": type(table.source)(**source)})},
    })  # fmt: skip
    provision.provision(log, derived)
    route = Route(run=run, policy=POLICY, source_run=RUN, source_policy=POLICY)
    recipe = make_recipe(group_size=table.dispatch.group_size)
    found = Partitions(log, route, recipe, patience_s=5.0, commit_every_s=0.0, max_tokens=1000)
    for _ in range(1000):
        if not found.work(0.0):
            break
    return found


def _figures(found: Audit) -> dict[str, Any]:
    return audit_command.facts(found) | {"waiting": len(found.waiting_outcomes), "dropped": len(found.dropped_outcomes)}


def test_today_goes_on_with_what_another_release_began(sim: Simulation) -> None:
    publish(sim.log, RUN, *map(published, rewritten(sim.log)))
    provision.ensure(sim.log, sim.settings)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, sim)
        try:
            before = sim.watcher.ledger.steps_done
            _staff(sim)
            sim.calm()
            sim.until(sim._published)
            sim.drain()
        finally:
            sim.end()
    found = audit_policy(sim.log, sim.settings, POLICY)
    assert found.accounts.ok and found.accounts.pending == 0, found.accounts.findings
    assert found.ledger.steps_done == sim.settings.policies[POLICY].train.steps > before >= 5
    assert found.accounts.dead_lettered == 0


def test_everybody_reads_another_releases_records_as_if_they_were_todays(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, settings = sim.log, sim.settings
    wanted = _figures(audit_policy(log, settings, POLICY)), _steps(log, settings), _drops(log, settings)
    outcomes = [dataclasses.replace(outcome, run="") for outcome in effective(log)]
    texts = rewritten(log)
    assert _steps(log, settings) == 0, "nothing of it can be read yet"
    assert audit_policy(log, settings, POLICY).accounts.trained == 0
    assert not daemons(log, settings)

    publish(log, RUN, *map(published, texts))
    monkeypatch.setattr(wiring, "open_log", lambda settings, client_id: log)
    monkeypatch.setattr(preflight, "check_broker", lambda settings: None)
    monkeypatch.setattr(log, "close", lambda: None)
    shown: list[Audit] = []

    def show(audits: Sequence[Audit], path: Path | None) -> int:
        shown.extend(audits)
        return 0

    monkeypatch.setattr(audit_command, "show", show)
    assert audit_command.command(settings, policies=[POLICY]) == 0
    assert (_figures(shown[0]), _steps(log, settings), _drops(log, settings)) == wanted
    assert {row["role"] for row in daemons(log, settings)} == {"dispatch", "process", "rollout", "train"}
    assert [dataclasses.replace(outcome, run="") for outcome in effective(log)] == outcomes


def _drops(log: MemoryLog, settings: Settings) -> Any:
    return drops_command.facts(drops_command.drops_of(log, settings, POLICY, 1.0))


@pytest.mark.parametrize("is_published", [True, False])
def test_a_processor_buries_only_what_nobody_published(sim: Simulation, is_published: bool) -> None:
    """Also one that started before: it looks at the schemas once more before it buries."""
    log = sim.log
    num_records = sum(bounds.end for bounds in log.bounds(f"{RUN}.{POLICY}.trajectories").values())
    texts = rewritten(log)
    if is_published:
        publish(log, RUN, *map(published, texts))
    metrics = _again(log, sim.settings).metrics()
    assert metrics.get("dead_letters", 0) == (0 if is_published else num_records)
    assert (metrics.get("outcomes", 0) > 10) is is_published
