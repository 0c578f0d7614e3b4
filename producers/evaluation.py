"""One evaluation: the requests of a version, their episodes on an engine, and the record that sums them up. No log, no store."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from infra.settings import PolicyTable
from producers.environment import Environment
from producers.episode import WorkerInfo
from producers.episode_runner import EpisodeRunner
from producers.interval import estimate
from producers.splits import HELD_OUT, Split
from schemas.records import Eval, Request, Role, Sampling, Status, Trajectory, Version
from schemas.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What every version is asked: the same items with the same seeds, so that versions can be compared item by item."""

    run: str
    policy: str
    task: str
    split: str
    items: tuple[int, ...]
    sampling: Sampling
    seed: int


def make_exam(*, run: str, policy: str, table: PolicyTable, split: Split, name: str, episodes: int, seed: int) -> Exam:
    """The exam on a split: at most one episode per item, since a second look at an item tells less than it counts for."""
    there = split.num_held_out if name == HELD_OUT else split.num_training
    count = episodes if there is None else min(episodes, there)
    item_at = split.held_out if name == HELD_OUT else split.training
    given = table.sampling.model_dump()
    if table.eval.temperature == 0:
        given |= {"temperature": 1.0, "top_k": 1}  # the likeliest token, in a way that every engine knows
    else:
        given |= {"temperature": table.eval.temperature}
    return Exam(
        run=run, policy=policy, task=table.task.environment, split=name, items=tuple(map(item_at, range(count))),
        sampling=Sampling(**given), seed=derive_seed(seed, policy, "eval", name),
    )  # fmt: skip


def requests_of(exam: Exam, name: Version, environment: Environment) -> list[Request]:
    """Requests pinned to one version. They never stand on the log: no admission counts them, no trainer sees them."""
    return [
        Request(
            run=exam.run,
            policy=exam.policy,
            epoch=name.epoch,
            nonce="",
            group=f"eval-{name}-{exam.split}-{number}",
            group_size=1,
            index=0,
            attempt=0,
            partition=0,
            task=exam.task,
            environment=exam.task,
            item=item,
            payload=environment.payload(item),
            seed=derive_seed(exam.seed, number),
            sampling=exam.sampling,
            min_version=name.version,
            lifetime_ms=0,
            first_request_time_ms=0,
            worker="",
            session="",
        )
        for number, item in enumerate(exam.items)
    ]


class Sitting:
    """Episodes of one exam on an engine whose weights do not change meanwhile; `step` until it says that all have ended."""

    def __init__(
        self, requests: Sequence[Request], runner: EpisodeRunner, worker: WorkerInfo, concurrency: int
    ) -> None:
        assert not len(runner), "the runner still holds episodes of another exam"
        self._runner, self._worker, self._concurrency = runner, worker, concurrency
        self._waiting = deque(requests)
        self.ended: list[Trajectory] = []

    def step(self) -> bool:
        """One engine step; whether all episodes have ended. Raises EngineError."""
        while self._waiting and len(self._runner) < self._concurrency:
            self._runner.start(self._waiting.popleft(), 0, self._worker)
        self._runner.step(cut_chunks=False)
        self.ended += self._runner.finished
        self._runner.finished = []
        return not self._waiting and not len(self._runner)

    def abandon(self) -> None:
        """Forget what runs: no record will come of it."""
        self._waiting.clear()
        self._runner.leave()
        self._runner.chunks = []


def sum_up(exam: Exam, name: Version, ended: Sequence[Trajectory], *, seconds: float) -> Eval:
    """The record of a version. A failure is not a reward: such episodes are counted and are in no mean.

    Raises ValueError when a single episode has a reward and it is neither 0 nor 1: its spread is not known.
    """
    rewarded = [(trajectory, trajectory.reward) for trajectory in ended if trajectory.reward is not None]
    failed = len(ended) - len(rewarded)
    found = estimate([reward for _, reward in rewarded]) if rewarded else None
    return Eval(
        run=exam.run,
        policy=exam.policy,
        epoch=name.epoch,
        version=name.version,
        task=exam.task,
        environment=exam.task,
        split=exam.split,
        num_episodes=len(ended),
        num_failed=failed,
        mean_reward=found.mean if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        metrics={**_metrics([trajectory for trajectory, _ in rewarded]), "seconds": seconds},
    )


def _metrics(rewarded: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the episodes with a reward: sampled tokens, share cut off, and every named part."""
    if not rewarded:
        return {}
    sampled = [sum(s.count for s in t.segments if s.role is Role.SAMPLED) for t in rewarded]
    parts = sorted({name for t in rewarded for name in t.reward_parts})
    return {
        "mean_sampled_tokens": statistics.fmean(sampled),
        "truncated": statistics.fmean(t.status is Status.TRUNCATED for t in rewarded),
        **{f"part:{n}": statistics.fmean(t.reward_parts[n] for t in rewarded if n in t.reward_parts) for n in parts},
    }
