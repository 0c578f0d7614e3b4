"""Figures of each step where people look for them: a file of JSON lines, TensorBoard, and accelerate's other trackers.

The result on `steps` carries the same figures and is what counts; these are copies for the eye. A step that is executed
again after a crash is written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
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
        if self._path is not None:
            line = json.dumps({"step": step, "time": round(time.time(), 3), **metrics})
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                self._failed = False
            except OSError as error:
                if not self._failed:
                    _LOG.warning("figures not written", path=str(self._path), error=str(error))
                self._failed = True
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out what trackers still hold."""
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []
