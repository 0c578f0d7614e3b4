"""Chaos for processors: killed, frozen, cut off, with a broker that dies; nothing lost, nothing doubled, seeds replay it.

    OFFSETRL_CHAOS_SEED=7 make prove ARGS=tests/chaos

A planted bug (`OFFSETRL_PLANT` in the processors, see `support.chaos_processes`) turns the same checks red.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from infra.settings import EmbeddedTable
from support.chaos import Chaos, Report, own_broker, run_chaos
from support.chaos_processes import BUGS

pytestmark = [
    pytest.mark.broker,
    pytest.mark.e2e,
    # The client leaves the socket of a refused connection to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
SEED = int(os.environ.get("OFFSETRL_CHAOS_SEED", "1"))
CHECKER_BUG = "chain-not-checked"
OFTEN = ("commit-past-an-open-group",)
"""The bug that every `make test` plants."""


@pytest.fixture(scope="module")
def table() -> Iterator[EmbeddedTable]:
    """A broker that these tests may kill."""
    with own_broker() as table:
        yield table


def _run(chaos: Chaos, table: EmbeddedTable) -> Report:
    print(f"OFFSETRL_CHAOS_SEED={chaos.seed} {chaos}")
    report = run_chaos(chaos, table)
    print(dict(report.counts))
    gc.collect()  # sockets of refused connections, which the client leaves to the collector
    return report


def _expect(report: Report, chaos: Chaos) -> None:
    """Nothing was found, and what would have been found really happened."""
    assert report.findings == []
    counts = report.counts
    assert counts["processors killed"] + counts["brokers killed"] == chaos.num_kills
    counts["repeats"] = counts["repeated outcomes"] + counts["repeated dead letters"]
    for name in (
        "brokers killed", "frozen", "cuts", "repeats", "dead letters", "superseded", "late", "dropped", "awaiting plan"
    ):  # fmt: skip
        assert counts[name], f"{name} never happened: this run shows too little"


@pytest.mark.timeout(240)
def test_nothing_is_lost_or_doubled(table: EmbeddedTable) -> None:
    chaos = Chaos(seed=SEED, num_trajectories=1000, num_kills=20, num_broker_kills=2)
    _expect(_run(chaos, table), chaos)


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kafka_version", "seed"), [("4.2.2", SEED), ("4.2.2", SEED + 1), ("4.2.2", SEED + 2), ("4.4.0", SEED + 3)]
)
def test_nothing_is_lost_or_doubled_in_a_long_run_of_three_policies(kafka_version: str, seed: int) -> None:
    """Kafka 4.4.0 loses transaction markers when it is killed; nothing here rests on them."""
    chaos = Chaos(
        seed=seed, num_trajectories=10_000, num_kills=200, num_broker_kills=6, policies=("a", "b", "c"), drain_s=120.0
    )
    with own_broker(kafka_version) as table:
        _expect(_run(chaos, table), chaos)


def _small(bug: str, seed: int) -> Chaos:
    """A short run, made for one bug: a kept producer shows only while nobody kills it."""
    kills, lossy = (2, 0.15) if bug == "producer-kept-after-an-error" else (6, 0.06)
    drain_s = 12.0 if bug in BUGS else 60.0  # three times what a sound processor needs
    return Chaos(seed=seed, plant=bug, num_trajectories=200, num_kills=kills, lossy=lossy, drain_s=drain_s)


def _is_found(bug: str, table: EmbeddedTable) -> None:
    for seed in range(SEED, SEED + 3):
        if findings := _run(_small(bug, seed), table).findings:
            print(bug, findings)
            return
    raise AssertionError(f"the planted bug {bug!r} was not found by three seeds")


@pytest.mark.parametrize("bug", OFTEN)
def test_a_planted_bug_is_found(bug: str, table: EmbeddedTable) -> None:
    _is_found(bug, table)


@pytest.mark.prove
@pytest.mark.parametrize("bug", sorted({*BUGS, CHECKER_BUG} - set(OFTEN)))
def test_each_planted_bug_is_found(bug: str, table: EmbeddedTable) -> None:
    _is_found(bug, table)


@pytest.mark.prove
@pytest.mark.parametrize("like", ["", "producer-kept-after-an-error"])
def test_the_same_short_runs_without_a_bug_find_nothing(like: str, table: EmbeddedTable) -> None:
    for seed in range(SEED, SEED + 2):
        assert _run(replace(_small(like, seed), plant="", drain_s=12.0), table).findings == []
