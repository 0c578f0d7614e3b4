"""Bench `spot`: half of the rollout workers killed with SIGKILL every 10 s and replaced, against nobody killed.

Real daemons on a real broker and a real object store, every worker a process (`support.spot_run`); rollouts sleep
(`support.paced`), 9 s in the mean, p99 twice the median. Three runs during the same seconds: nobody killed; killed,
and unfinished rollouts go on from what their worker had saved (`partials`); the same kills, and they begin anew
(`partial_tokens = 0`).

Throughput is in rollout-seconds of published trajectories, so that a long one counts as much as the work in it, over the
slot-seconds of the workers alive, each from its first sign of serving until it is killed; nothing can do more than 1.
`alive`: that of the run with kills over that without; `restart`: going on over beginning anew; `lost`: members, asked for
until 10 s before the end of the counted time, whose group was closed without them or not at all, and trajectories that
the audit cannot account for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bench.broker import broker
from bench.harness import Bench
from support.paced_run import Load
from support.servers import BUCKET, session_s3
from support.spot_run import Fleet, preload

KILL_EVERY_S = 10.0
WARM_S, RUN_S, SETTLE_S = 4.0, 34.0, 22.0
LOAD = Load(
    slots=96,
    workers=6,
    group_size=4,
    batch_groups=16,
    max_staleness=8,
    mean_s=9.0,
    tail=2.0,
    step_s=0.2,
    num_tokens=64,
    tables={
        "dispatch": {"heartbeat_timeout_s": 2.0, "lifetime_s": 240.0, "reissue_after_s": 60.0},
        "rollout": {"heartbeat_s": 0.5, "partial_tokens": 8},
    },
)
START_S = 60.0
ALIVE, RESTART = 0.9, 1.2


def run(bench: Bench) -> None:
    """On servers of its own."""
    preload()
    with broker() as found:
        endpoint = session_s3()
        s3 = {
            "endpoint_url": endpoint.url,
            "bucket": BUCKET,
            "access_key": endpoint.access_key,
            "secret_key": endpoint.secret_key,
        }
        servers = {"kafka": {"bootstrap_servers": found.bootstrap}, "s3": s3}
        compare(bench, LOAD, servers, kill_every_s=KILL_EVERY_S, warm_s=WARM_S, run_s=RUN_S, settle_s=SETTLE_S)


def compare(
    bench: Bench,
    base: Load,
    servers: Mapping[str, Any],
    *,
    kill_every_s: float,
    warm_s: float,
    run_s: float,
    settle_s: float,
) -> None:
    """All three runs; counted for `run_s`, from `warm_s` after all have begun.

    Meanwhile workers are killed; in `settle_s` more, what had begun before has to come.
    """
    anew = {**base.tables, "rollout": {**base.tables["rollout"], "partial_tokens": 0}}
    plans = {
        "nobody killed": (base, 0.0),
        "going on": (base, kill_every_s),
        "anew": (base.with_(tables=anew), kill_every_s),
    }
    fleets: dict[str, Fleet] = {}
    try:
        for number, (name, (load, every_s)) in enumerate(plans.items()):
            fleets[name] = Fleet.start(f"spot-{number}", load, every_s, **servers)
        wait_begun(fleets)
        start_s = time.time() + warm_s
        end_s = start_s + run_s
        tend(fleets, end_s)
        for fleet in fleets.values():
            fleet.spare()
        tend(fleets, end_s + settle_s)
        shares = {name: _account(bench, name, fleet, start_s, end_s, kill_every_s) for name, fleet in fleets.items()}
        bench.check("alive", shares["going on"] / shares["nobody killed"], ALIVE)
        bench.check("restart", shares["going on"] / shares["anew"], RESTART)
        bench.check(
            "lost", sum(fleets["going on"].missing(end_s - kill_every_s)) + fleets["going on"].unaccounted(), 0, "lower"
        )
        bench.hold_against("rollout-seconds of a slot-second", 1.0, "")
    finally:
        for fleet in fleets.values():
            fleet.close()


def wait_begun(fleets: Mapping[str, Fleet]) -> None:
    """Until every run has published something; from then on workers are killed."""
    deadline = time.time() + START_S
    while not all(fleet.has_begun for fleet in fleets.values()):
        assert time.time() < deadline, f"no trajectory within {START_S:g} s"
        tend(fleets, time.time() + 0.2)
    for fleet in fleets.values():
        fleet.begin()


def tend(fleets: Mapping[str, Fleet], until_s: float) -> None:
    """Look after all of them until a time."""
    while time.time() < until_s:
        for fleet in fleets.values():
            fleet.tend()
        time.sleep(0.05)


def _account(bench: Bench, name: str, fleet: Fleet, start_s: float, end_s: float, kill_every_s: float) -> float:
    alive_s, useful_s = fleet.alive_s(start_s, end_s), fleet.useful_s(start_s, end_s)
    assert useful_s > 0, f"the run {name!r} published nothing between {start_s:.0f} and {end_s:.0f}"
    lost, pending = fleet.missing(end_s - kill_every_s)
    bench.note(
        f"{name:<14} {useful_s / alive_s:6.3f} rollout-seconds a slot-second  {alive_s:6.0f} slot-seconds  "
        f"{fleet.num_killed} killed  "
        f"a worker serves {fleet.start_s():.1f} s after its start  members lost {lost}, open {pending}"
    )
    return useful_s / alive_s
