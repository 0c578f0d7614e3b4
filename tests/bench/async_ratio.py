"""Bench `async`: a run of paced rollouts with staleness allowed, against the same run with a barrier after every batch.

Every daemon is the product's own, on a log in memory (the broker is not what is measured); engine and learner sleep
(`support.paced`). R slots, N = 4 R rollouts a batch, lognormal durations of which p99 is 3.2 or 10 times the median, a
training step as long as a batch takes on R slots that never wait. The barrier loop is `max_staleness = 0`: the same
workers get a batch, all of it is trained on, and only then the next one is begun. All runs work during the same seconds,
each in a process of its own; steps are counted once the first ones are over.

Bound: steps a second are at most 1 / max(step time, N x mean duration / R). `of bound`: the asynchronous run's share of
it, the worse of the two tails; `barrier 3.2` and `barrier 10`: its steps a second over the barrier loop's. Shown beside
them: what the barrier loop would do if only rollouts and steps took time, so that it is no straw man.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bench.harness import Bench
from support.paced_run import Load, Ran, side_by_side

TAILS = (3.2, 10.0)
ETA = 4
SHOWN_ETAS = {3.2: (0, ETA), 10.0: (0, 1, ETA)}
RUN_S, WARM_S = 58.0, 8.0
OF_BOUND = 0.9
BARRIER = {3.2: 2.3, 10.0: 4.0}


def run(bench: Bench) -> None:
    """All runs at once, and the ratios between them."""
    compare(bench, Load(run_s=RUN_S, warm_s=WARM_S), SHOWN_ETAS)


def compare(bench: Bench, base: Load, shown: Mapping[float, tuple[int, ...]]) -> None:
    """Run `base` at each tail with each eta, which must include 0 and the greatest."""
    loads = {(tail, eta): base.with_(tail=tail, max_staleness=eta) for tail, etas in shown.items() for eta in etas}
    ran = side_by_side(loads)
    shares = []
    for tail, etas in shown.items():
        bench.note(f"p99 / median {tail:g}: bound {bound(loads[tail, 0]):.3f} steps/s")
        for eta in etas:
            bench.note(_row(loads[tail, eta], ran[tail, eta]))
        barrier, free = ran[tail, 0].steps_per_s, ran[tail, max(etas)].steps_per_s
        shares.append(free / bound(loads[tail, 0]))
        bench.check(f"barrier {tail:g}", free / barrier, BARRIER[tail])
    bench.check("of bound", min(shares), OF_BOUND)
    bench.hold_against("steps a second that rollouts and steps allow", bound(base), "steps/s")


def bound(load: Load) -> float:
    """Steps a second at most: neither the trainer nor the slots ever wait.

    >>> bound(Load(slots=128, batch_groups=64, group_size=8, mean_s=0.5, step_s=2.0))
    0.5
    """
    return 1 / max(load.step_s, load.batch * load.mean_s / load.slots)


def _row(load: Load, ran: Ran) -> str:
    name = "barrier loop" if load.max_staleness == 0 else f"eta {load.max_staleness}"
    text = (
        f"  {name:<14} {ran.steps_per_s:6.3f} steps/s  {ran.steps_per_s / bound(load):5.1%} of bound  "
        f"{len(ran.counted):3d} steps  mean age {statistics.mean(ran.ages):4.2f}  stale {ran.stale} of {ran.kept}  "
        f"CPU {ran.cpu_s:5.1f} s"
    )
    if load.max_staleness == 0:
        alone_s = [load.makespan_s(sorted(ran.groups[step])) + load.step_s for step in ran.counted]
        text += f"  ({1 / statistics.mean(alone_s):.3f} with nothing but rollouts and steps)"
    return text
