"""Bench `slow-env`: tools of which 5 % of the calls take 20 times longer and a few hang, against a barrier per batch.

Every daemon is the product's own, on a log in memory (the broker is not what is measured); engine, tools and learner
sleep (`support.paced`, `support.paced_tools`). Two turns an episode, each with a tool call; a call that hangs is given
up at the worker's time limit and its member has no reward, on both sides; a group needs 6 of its 8 members. The barrier
is `max_staleness = 0`: the same workers get a batch, all of it has to come back, and only then the next one is begun.
Both runs work during the same seconds, each in a process of its own.

`hung tools`: steps a second over the barrier's. `idle`: the share of its time that the trainer spends on anything but
steps. Held against the trainer: nothing can do more than 1 / step time.
"""

from __future__ import annotations

from collections import Counter

from bench.harness import Bench
from support.paced_run import Load, Ran, side_by_side

ETA = 4
TOOLS = {"turns": 2, "call_s": 0.2, "slow": 0.05, "slower": 20.0, "hung": 0.003}
TOOL_TIMEOUT_S = 8.0
LOAD = Load(
    slots=192,
    batch_groups=32,
    mean_s=0.1,
    tail=3.2,
    step_s=2.5,
    run_s=62.0,
    warm_s=12.0,
    tables={
        "task": {"environment": "support.paced_tools:make_environment", "settings": TOOLS},
        "rollout": {"tool_timeout_s": TOOL_TIMEOUT_S},
        "process": {"min_members": 6},
    },
)
BARRIER = 3.0
MOST_IDLE = 0.05


def run(bench: Bench) -> None:
    """Both at once."""
    compare(bench, LOAD)


def compare(bench: Bench, base: Load) -> None:
    """Run `base` with a barrier and without."""
    loads = {name: base.with_(max_staleness=eta) for name, eta in (("barrier", 0), ("ours", ETA))}
    ran = side_by_side(loads)
    for name in loads:
        bench.note(_row(name, ran[name]))
    ours = ran["ours"].steps_per_s
    bench.check("hung tools", ours / ran["barrier"].steps_per_s, BARRIER)
    bench.check("idle", 1 - ours * base.step_s, MOST_IDLE, "lower")
    bench.hold_against("the trainer alone", 1 / base.step_s, "steps/s")


def _row(name: str, ran: Ran) -> str:
    lost = Counter({status: count for status, count in ran.statuses.items() if status != "ok"})
    return (
        f"{name:<8} {ran.steps_per_s:6.3f} steps/s  {len(ran.counted):3d} steps  greatest age {max(ran.ages)}  "
        f"stale {ran.stale} of {ran.kept}  members {ran.statuses['ok']} ok, {dict(lost)}"
    )
