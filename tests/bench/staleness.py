"""Bench `staleness`: a fleet that is faster than its trainer, at several staleness bounds, against the same without any.

Every daemon is the product's own, on a log in memory (the broker is not what is measured); engine and learner sleep
(`support.paced`). The fleet could feed 1.5 trainers. Ungated means a bound that is never reached: then nothing holds
rollouts back, and their age grows with the backlog. All runs work during the same seconds, each in a process of its own.

`bound kept`: steps that ate a token older than the bound, reckoned from the versions of the tokens themselves; 0.
`stale drops`: the share of kept groups that were set aside because of their age, of the worst bound. `ungated`: steps
a second at eta = 2 over those without a gate. Held against the trainer: no run can do more than 1 / step time.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness import Bench
from support.paced_run import Load, Ran, side_by_side

ETAS = (0, 1, 2, 4)
HELD_ETA = 2
UNGATED = 10_000
LOAD = Load(slots=64, batch_groups=32, tail=3.2, mean_s=0.5, step_s=3.0, run_s=50.0, warm_s=6.0)
MOST_DROPS = 0.05
OF_UNGATED = 0.97


def run(bench: Bench) -> None:
    """All bounds at once."""
    compare(bench, LOAD, ETAS)


def compare(bench: Bench, base: Load, etas: Sequence[int]) -> None:
    """Run `base` with each bound, which must include `HELD_ETA`, and without any."""
    loads = {eta: base.with_(max_staleness=eta) for eta in (*etas, UNGATED)}
    ran = side_by_side(loads)
    for eta in loads:
        bench.note(_row(eta, ran[eta]))
    bench.check("bound kept", sum(age > eta for eta in etas for age in ran[eta].ages), 0, "lower")
    bench.check("stale drops", max(ran[eta].stale / ran[eta].kept for eta in etas), MOST_DROPS, "lower")
    bench.check("ungated", ran[HELD_ETA].steps_per_s / ran[UNGATED].steps_per_s, OF_UNGATED)
    bench.hold_against("the trainer alone", 1 / base.step_s, "steps/s")


def _row(eta: int, ran: Ran) -> str:
    name = "ungated" if eta == UNGATED else f"eta {eta}"
    return (
        f"{name:<8} {ran.steps_per_s:6.3f} steps/s  {len(ran.counted):3d} steps  greatest age {max(ran.ages):3d}  "
        f"mean {sum(ran.ages) / len(ran.ages):5.2f}  stale {ran.stale} of {ran.kept}"
    )
