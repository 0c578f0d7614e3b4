"""Evaluations: of several records about the same weights, task and split, the first one on `evals` counts.

Two evaluators may do the same at once, or one may repeat a record after a failure; every reader takes the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas.records import Eval, Version


class Evaluated(NamedTuple):
    """What an evaluation is about."""

    name: Version
    task: str
    split: str


def about(record: Eval) -> Evaluated:
    """What a record is about."""
    return Evaluated(Version(record.epoch, record.version), record.task, record.split)


def first_evals(records: Iterable[Eval]) -> dict[Evaluated, Eval]:
    """The records that count, of all in the order of the log.

    >>> def said(version, mean):
    ...     return Eval(run="r", policy="p", epoch=1, version=version, task="t", environment="t", split="held-out",
    ...                 num_episodes=2, num_failed=0, mean_reward=mean, low=0.0, high=1.0)
    >>> [(str(key.name), record.mean_reward) for key, record in first_evals([said(4, 0.5), said(4, 0.9), said(8, 0.7)]).items()]
    [('1-4', 0.5), ('1-8', 0.7)]
    """
    found: dict[Evaluated, Eval] = {}
    for record in records:
        found.setdefault(about(record), record)
    return found


def in_short(record: Eval) -> dict[str, object]:
    """A record for a log line or a table.

    >>> in_short(Eval(run="r", policy="p", epoch=1, version=4, task="t", environment="t", split="held-out", num_episodes=9,
    ...     num_failed=1, mean_reward=0.5, low=0.25, high=0.75))["mean_reward"]
    '0.500 (0.250 to 0.750)'
    """
    mean, low, high = record.mean_reward, record.low, record.high
    return {
        "version": f"{record.epoch}-{record.version}",
        "split": record.split,
        "mean_reward": "none" if mean is None else f"{mean:.3f} ({low:.3f} to {high:.3f})",
        "episodes": record.num_episodes,
        "failed": record.num_failed,
    }
