"""A dispatcher that starts again reads about one lifetime of the log, and knows what it would know from all of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import producers.dispatch_feed
from infra.log import Committed, Log, Place
from infra.ownership import Ownership
from producers.dispatch_feed import Feed
from producers.dispatch_state import DispatchState
from producers.trails import Trail
from schemas.names import topic
from support.loop import POLICY, RUN, make_daemon
from support.silence import silence
from support.simulation import Simulation, install


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence():
        yield


class WithoutPositions:
    """A log on which nobody has stored a position."""

    def __init__(self, base: Log) -> None:
        self._base = base

    def committed(self, group: str, places: Iterable[Place]) -> dict[Place, Committed]:
        return {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def read_whole(sim: Simulation, limits: Any, until: Feed) -> tuple[DispatchState, Ownership]:
    """What somebody knows who reads everything, up to where the other one has read."""
    state = DispatchState(limits, sim.settings.run.partitions)
    inboxes = [Place(topic(RUN, POLICY, "requests"), n) for n in range(sim.settings.run.inboxes)]
    ownership = Ownership("dispatch", RUN, POLICY, inboxes)
    log: Any = WithoutPositions(sim.log)
    feed = Feed(make_daemon(log, sim.settings), state, ownership, lambda: 0.0)
    ends = {place: until.reader.position(place) for place in feed.places}
    while any(feed.reader.position(place) < end for place, end in ends.items()):
        for envelope in feed.reader.poll(0.0):
            if envelope.offset < ends[envelope.place]:
                feed.handle(envelope)
    feed.caught_up()
    feed.reader.close()
    return state, ownership


def known(state: DispatchState, ownership: Ownership) -> dict[str, Any]:
    """Everything that a decision may depend on."""
    return {
        "groups": {
            name: (group.number, group.group_size, group.min_version, group.lifetime_ms, group.item, group.closing, {
                index: (a.attempt, a.session, a.first_request_time_ms, a.asked_ms, a.arrived, a.resumes, state.resume(group, index))
                for index, a in group.asked.items()
            })
            for name, group in state.groups.items()
        },
        "strays": {name: (stray.partition, stray.indices, stray.closing) for name, stray in state.strays.items()},
        "backlog": set(state.backlog),
        "next": state.next_number,
        "floor": state.numbers.floor,
        "counts": (state.kept, state.dropped),
        "chains": {partition: chain.last for partition, chain in state.chains.items()},
        "steps": (state.ledger.steps_planned, state.ledger.steps_done),
        "workers": {session: (w.name, w.inbox, w.outstanding, w.draining) for session, w in state.workers.items()},
        "min_version": state.next_min_version(),
        "claims": [ownership.owner(place) for place in ownership.places],
        "history": state.history,
    }  # fmt: skip


def restarts(seed: int, folder: Path, *, num_faults: int = 25, **tables: Any) -> Counter[str]:
    """One run with faults; at each start of a dispatcher both ways of reading are compared."""
    sim = Simulation(seed, folder, rollout={"partial_tokens": seed % 2}, **tables)
    real_caught_up, counts = Feed.caught_up, Counter[str]()
    checking = False

    def caught_up(self: Feed) -> None:
        nonlocal checking
        real_caught_up(self)
        if checking or sim.log.away:
            return
        checking = True
        whole, ownership = read_whole(sim, self.state.limits, self)
        checking = False
        assert known(self.state, self._ownership) == known(whole, ownership)
        counts["starts"] += 1
        counts["from a position"] += bool(self._stored)

    with pytest.MonkeyPatch.context() as patch:
        install(patch, sim)
        patch.setattr(Feed, "caught_up", caught_up)
        patch.setattr(producers.dispatcher, "_STORE_EVERY_S", 0.2)
        try:
            sim.run(num_faults)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\nfaults: {'; '.join(sim.happened)}") from error
    return counts


@pytest.mark.parametrize("memory", [0, 5, 1000])
def test_the_same_state_as_a_full_read(memory: int, tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(4):
        counts += restarts(seed, tmp_path, task={"memory_groups": memory})
    assert counts["from a position"] >= 8, counts


@pytest.mark.prove
def test_the_same_state_as_a_full_read_of_many_seeds(tmp_path: Path) -> None:
    for seed in range(100, 170):
        restarts(seed, tmp_path, num_faults=40, task={"memory_groups": seed % 3 * 4})


def _forgets_the_backlog(patch: pytest.MonkeyPatch) -> None:
    real = Trail.first
    patch.setattr(Trail, "first", lambda self, floor, waiting=(): real(self, floor))


def _forgets_open_groups(patch: pytest.MonkeyPatch) -> None:
    real = Trail.first
    patch.setattr(Trail, "first", lambda self, floor, waiting=(): real(self, 10**9, waiting))


@pytest.mark.prove
@pytest.mark.parametrize("bug", [_forgets_the_backlog, _forgets_open_groups])
def test_each_planted_bug_is_found(bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(40):
        try:
            restarts(seed, tmp_path, task={"memory_groups": 0})
        except AssertionError:
            return
    raise AssertionError(f"{bug.__name__}: not noticed in 40 runs")


def test_a_restart_reads_about_one_lifetime(tmp_path: Path) -> None:
    """In a run of some lifetimes, what a successor reads of the long topics does not grow with the run."""
    read: Counter[str] = Counter()
    real = Feed.handle

    def handle(self: Feed, envelope: Any) -> None:
        real(self, envelope)
        if watching:
            read[envelope.topic.rpartition(".")[2]] += 1

    sim = Simulation(3, tmp_path, train={"steps": 120}, task={"memory_groups": 6})
    sim.faults, watching = False, False
    with pytest.MonkeyPatch.context() as patch:
        install(patch, sim)
        patch.setattr(Feed, "handle", handle)
        try:
            for role, name in (("train", ""), ("process", ""), ("rollout", "w0")):
                sim.start(role, name)
            first = sim.start("dispatch")
            sim.until(lambda: sim.watcher.ledger.steps_done >= 100, limit_s=math.inf)
            first.kill()
            watching = True
            second = sim.start("dispatch")
            sim.until(lambda: sim.watcher.claims[Place(topic(RUN, POLICY, "requests"), 0)].epoch == 2)
            second.kill()
        finally:
            sim.end()
    there = {kind: sim.watcher.counts[name] for kind, name in (
        ("requests", "Request"), ("trajectories", "Trajectory"), ("samples", "Outcome"),
    )}  # fmt: skip
    for kind, number in there.items():
        assert number > 190, there
        assert read[kind] < number / 3, (kind, read, there)
