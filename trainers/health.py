"""Figures of each step where people look for them: a file of JSON lines, TensorBoard, and accelerate's other trackers.

The result on `steps` carries the same figures and is what counts; these are copies for the eye. A step that is executed
again after a crash is written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog

from trainers.acceleration import Tracker, open_trackers

JSONL = "jsonl"
_LOG = structlog.get_logger("offsetrl.health")


class Health:
    """The trackers of one policy's trainer, opened at its first step."""

    def __init__(self, names: Sequence[str], run: str, policy: str, folder: Path) -> None:
        """Files go under `folder`. Raises SettingError for trackers that are not there."""
        self._folder = folder
        self._path = folder / "steps.jsonl" if JSONL in names else None
        self._trackers: list[Tracker] = open_trackers([n for n in names if n != JSONL], f"{run}.{policy}", folder)
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's figures. A disk that is full costs the copy, never the training."""
        writes: list[Callable[[], object]] = [partial(t.log, dict(metrics), step=step) for t in self._trackers]
        if self._path is not None:
            line = json.dumps({"step": step, "time": round(time.time(), 3), **metrics})
            writes.append(partial(self._write, self._path, line))
        self._failed = not self._all(writes)

    def close(self) -> None:
        """Write out what trackers still hold."""
        self._all([tracker.finish for tracker in self._trackers])
        self._trackers = []

    def _write(self, path: Path, line: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _all(self, writes: Sequence[Callable[[], object]]) -> bool:
        """Whether each of them could write; said once until all can again."""
        errors: list[OSError] = []
        for write in writes:
            try:
                write()
            except OSError as error:
                errors.append(error)
        if errors and not self._failed:
            _LOG.warning("figures not written", folder=str(self._folder), error=str(errors[0]))
        return not errors
