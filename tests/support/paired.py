"""Paired studies: the same task, seeds and trained tokens under several trainers' settings, and what comes of each.

Of a seed, all arms begin with the same weights and draw the same items. Each arm is a run of its own, by real daemons
over the servers of one folder (`offsetrl run`), which stops at the same number of trained tokens; then its last version
answers the same held-out questions as the others'. Differences are judged between arms of a seed, over seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from infra.audit import Audit, audit
from infra.log import Place
from infra.ownership import read_all, read_record
from schemas.names import topic
from schemas.records import Eval
from support.demo import Home, environment, wait_until

POLICY = "main"
EPISODES = 500
ENDS = 1_000_000
"""Of so many versions an evaluator measures the first and the run's last."""
RUN_S = 1200.0
ONE_SIDED_95 = {2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943}
"""Student's t by degrees of freedom: P(T <= t) = 0.95."""


class Arm(NamedTuple):
    """One way to train: its name and the settings that make it."""

    name: str
    train: Mapping[str, Any]


SYNCHRONOUS = Arm("synchronous", {"max_staleness": 0})
ASYNCHRONOUS = Arm("asynchronous", {"max_staleness": 4})
UNCORRECTED = Arm("uncorrected", {"max_staleness": 4, "correction": "none", "allow_uncorrected": True})
ARMS = (SYNCHRONOUS, ASYNCHRONOUS, UNCORRECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A task, how it is trained, and where its weights begin."""

    name: str
    model: Sequence[str]
    """Arguments of `offsetrl model new`."""
    policy: Mapping[str, Any]
    """[policies.main] of every run, but for the model."""
    demonstrations: Callable[[int], Sequence[Mapping[str, str]]] = lambda seed: ()
    """What the weights of a seed learn first, where `warm` says how."""
    warm: Mapping[str, Any] | None = None
    """Settings of the supervised run that the arms go on from; none: they begin with random weights."""


class Score(NamedTuple):
    """What an arm came to."""

    before: float
    """Mean reward of the first weights on the held-out questions."""
    after: float
    """Of the last ones."""
    tokens: int
    """Trained."""
    steps: int
    mean_age: float
    """Versions; over trained rows."""
    seconds: float


def pair(home: Home, study: Study, seed: int, arms: Sequence[Arm] = ARMS) -> dict[str, Score]:
    """All arms of a seed, side by side."""
    model = home.folder / "models" / f"{study.name}-{seed}"
    if not model.exists():
        home.command("model", "new", str(model), *study.model, "--seed", str(seed)).expect()
    fork = _warmed(home, study, seed, model) if study.warm else {}
    with ThreadPoolExecutor(len(arms)) as pool:
        scores = pool.map(lambda arm: _trained(home, study, seed, model, arm, fork), arms)
        return dict(zip((arm.name for arm in arms), scores, strict=True))


def _config(home: Home, run: str, seed: int, policy: Mapping[str, Any]) -> Path:
    path = home.folder / f"{run}.toml"
    settings = {
        "run": {"name": run, "seed": seed, "folder": "runs", "partitions": 2, "inboxes": 1},
        "embedded": {"state": str(home.folder / "state")},
        "policies": {POLICY: policy},
    }
    path.write_text(tomlkit.dumps(settings))
    return path


def _trained(home: Home, study: Study, seed: int, model: Path, arm: Arm, fork: Mapping[str, Any]) -> Score:
    """One run from its first weights to its last, and what both are worth."""
    run = f"{study.name}-{seed}-{arm.name}"
    train = {**study.policy["train"], **fork, **arm.train}
    config = _config(home, run, seed, {**study.policy, "model": str(model), "train": train})
    started = time.monotonic()
    home.command("run", "--config", str(config), timeout_s=RUN_S).expect()
    seconds = time.monotonic() - started
    books = books_of(home, run)
    assert books.accounts.ok, books.accounts.findings
    results = books.ledger.results
    home.command("eval", "--config", str(config), "--every", str(ENDS), "--episodes", str(EPISODES)).expect()
    before, after = evals_of(home, run)
    tokens = sum(result.metrics["tokens"] for result in results)
    ages = [float(key.rpartition("-")[2]) * value for result in results for key, value in result.metrics.items()
            if key.startswith("rows.age-")]  # fmt: skip
    return Score(before, after, int(tokens), len(results), sum(ages) / len(results), seconds)


def books_of(home: Home, run: str) -> Audit:
    """The accounts of a run."""
    with home.log(run) as log:
        return audit(log, run, POLICY, max_tokens=1000)


def evals_of(home: Home, run: str) -> list[float]:
    """Mean rewards of a run's evaluations, in the order of versions."""
    name = topic(run, POLICY, "evals")
    with home.log(run) as log:
        records = [read_record(envelope) for envelope in read_all(log, Place(name, 0), log.bounds(name)[0])]
    evals = sorted((record for record in records if isinstance(record, Eval)), key=lambda record: record.version)
    assert all(one.num_failed == 0 and one.num_episodes == EPISODES for one in evals), evals
    return [one.mean_reward for one in evals if one.mean_reward is not None]


# Warm start --------------------------------------------------------------------------------------------------------


def _warmed(home: Home, study: Study, seed: int, model: Path) -> dict[str, Any]:
    """Settings that begin a run with the weights of a supervised one, which is trained first."""
    run = f"{study.name}-{seed}-warm"
    assert study.warm is not None
    config = _config(home, run, seed, {**study.policy, **study.warm, "model": str(model)})
    demos = home.folder / f"{run}.jsonl"
    demos.write_text("\n".join(json.dumps(row) for row in study.demonstrations(seed)))
    home.command("import", str(demos), "--config", str(config)).expect()
    steps = study.warm["train"]["steps"]
    folder = home.folder / "runs" / run / POLICY / "checkpoints"
    with _daemon(home, "process", config), _daemon(home, "train", config):
        wait_until(lambda: any(folder.glob(f"ck-*-{steps:08d}-*")), f"the last of {steps} supervised steps", RUN_S)
    (checkpoint,) = folder.glob(f"ck-*-{steps:08d}-*")
    return {"fork_from": str(checkpoint), "fork_optimizer": False}


@contextlib.contextmanager
def _daemon(home: Home, role: str, config: Path) -> Iterator[None]:
    """One daemon, told to end when the context is left."""
    with (home.folder / f"{config.stem}-{role}.log").open("wb") as output:
        process = subprocess.Popen(
            home.arguments(role, "--config", str(config)), cwd=home.folder, env=environment(), stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, Path(output.name).read_text(errors="replace")[-3000:]


# Judging -----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Of paired scores: their mean, and the lower bound that holds it with 95 % confidence (one-sided)."""

    mean: float
    low: float


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Mean of the paired differences, and mean - t s / sqrt(n).

    >>> [round(number, 4) for number in difference([0.9, 0.8, 0.9], [0.8, 0.8, 0.8])]  # t = 2.92, s = 0.0577
    [0.0667, -0.0307]
    """
    found = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(found)
    return Difference(mean, mean - ONE_SIDED_95[len(found) - 1] * statistics.stdev(found) / math.sqrt(len(found)))


def table(scores: Mapping[int, Mapping[str, Score]]) -> str:
    """All scores and the differences, as text."""
    lines = [f"{'seed':>4}  {'arm':<14}{'before':>8}{'after':>8}{'tokens':>9}{'steps':>7}{'age':>6}{'s':>7}"]
    for seed, (name, score) in itertools.chain.from_iterable(
        ((seed, entry) for entry in by_arm.items()) for seed, by_arm in scores.items()
    ):
        lines.append(
            f"{seed:>4}  {name:<14}{score.before:>8.3f}{score.after:>8.3f}{score.tokens:>9}{score.steps:>7}"
            f"{score.mean_age:>6.2f}{score.seconds:>7.0f}"
        )
    if len(scores) > 2:
        first = after(scores, SYNCHRONOUS)
        for arm in (ASYNCHRONOUS, UNCORRECTED):
            found = difference(after(scores, arm), first)
            lines.append(f"{arm.name} - synchronous: {found.mean:+.4f}, at least {found.low:+.4f} with 95 % confidence")
    return "\n".join(lines)


def before(scores: Mapping[int, Mapping[str, Score]], arm: Arm) -> list[float]:
    """An arm's first scores, by seed."""
    return [by_arm[arm.name].before for by_arm in scores.values()]


def after(scores: Mapping[int, Mapping[str, Score]], arm: Arm) -> list[float]:
    """An arm's last scores, by seed."""
    return [by_arm[arm.name].after for by_arm in scores.values()]
