"""A run on this machine: watched until it is done, then drained in the order in which records flow."""

from __future__ import annotations

import math
import time

from infra.demo.keeper import Keeper
from infra.demo.run import Run
from infra.demo.view import View
from infra.demo.watch import Watch
from infra.lifecycle import Stop
from infra.log import Log, Place
from infra.supervisor import Supervisor
from schemas.errors import DeadlineExceeded, OffsetRLError
from schemas.names import commit_group, topic

STALL_S = 120.0
"""Without any step or version for so long, a run gives up and says what it waited for."""
_GRACE_S = 40.0
_DRAIN_S = 60.0
_MEASURE_S = 300.0
"""For evaluators to measure what is published, once training is over."""


def watch_until_done(run: Run, view: View, watch: Watch, supervisor: Supervisor, stop: Stop, stall_s: float) -> None:
    """Until every policy's run has ended, or a signal asks to stop. Raises DeadlineExceeded naming what was waited for."""
    keeper = Keeper(run.settings)
    while not (watch.done or stop.requested):
        watch.poll(0.25)
        if again := keeper.tend():
            view.say(f"embedded {' and '.join(again)} had died; started again")
        if math.isnan(run.seconds_to_first_step) and any(p.ledger.steps_done for p in watch.policies.values()):
            run.seconds_to_first_step = time.monotonic() - run.started_s
            view.say(f"first step trained after {run.seconds_to_first_step:.1f} s")
        view.show(watch.policies, {status.name: len(status.exits) for status in supervisor.status()})
        ended = {name: code for name, code in supervisor.finished().items() if code}
        if ended:
            name, code = next(iter(ended.items()))
            raise OffsetRLError(f"{name} ended with code {code} and is not started again:\n{supervisor.tail(name)}")
        limit_s = max(stall_s, STALL_S) if math.isnan(run.seconds_to_first_step) else stall_s  # starting takes its time
        if time.monotonic() - watch.moved_at_s > limit_s:
            raise DeadlineExceeded(_stalled(watch, supervisor, limit_s))


def _stalled(watch: Watch, supervisor: Supervisor, stall_s: float) -> str:
    waits = [
        f"{p.policy} (step {p.ledger.steps_done}) waits for {p.waiting_for()}"
        for p in watch.policies.values()
        if not p.done
    ]
    deaths = {name: list(codes) for name, codes in supervisor.exits().items() if codes}
    said = f"; exit codes so far: {deaths}" if deaths else ""
    return f"no step and no version for {stall_s:g} s: {'; '.join(waits)}{said}"


def drain(run: Run, log: Log, supervisor: Supervisor, watch: Watch, view: View) -> None:
    """Workers finish what runs, dispatchers close what is open, processors judge it, trainers set aside what is left.

    A run that was stopped before its end keeps its open groups: the next start goes on with them.
    """
    policies = list(run.settings.policies)
    for role in ("rollout", "dispatch"):
        supervisor.terminate([f"{role}-{policy}" for policy in policies], _GRACE_S)
    deadline = time.monotonic() + _DRAIN_S
    while watch.done and (behind := _behind(run, log)):
        watch.poll(0.1)
        view.show(watch.policies, {})
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"draining: processors were still behind after {_DRAIN_S:g} s: {', '.join(behind)}")
    for role in ("process", "train"):
        supervisor.terminate([f"{role}-{policy}" for policy in policies], _GRACE_S)
    _end_evaluators(run, supervisor, watch, view)
    watch.poll(0.1)


def _end_evaluators(run: Run, supervisor: Supervisor, watch: Watch, view: View) -> None:
    """They end by themselves once the run's last version is measured."""
    names = [f"eval-{policy}" for policy, table in run.settings.policies.items() if table.eval.every]
    if not names:
        return
    try:
        if watch.done:
            view.say("measuring the last versions")
            supervisor.wait(names, _MEASURE_S)
    except DeadlineExceeded as error:
        view.say(f"{error}; measure the rest with `offsetrl eval --follow`")
    supervisor.terminate(names, _GRACE_S)


def _behind(run: Run, log: Log) -> list[str]:
    """Partitions whose committed position has not reached their end."""
    found = []
    for policy in run.settings.policies:
        name = topic(run.name, policy, "trajectories")
        bounds = log.bounds(name)
        places = {Place(name, partition): entry.end for partition, entry in bounds.items()}
        stored = log.committed(commit_group(run.name, policy, "process"), places)
        found += [
            f"{place.topic}[{place.partition}] at {stored[place].offset if place in stored else 0} of {end}"
            for place, end in places.items()
            if (stored[place].offset if place in stored else 0) < end
        ]
    return found
