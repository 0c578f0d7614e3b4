"""A demo under way, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from infra.audit import Audit
from infra.settings import Settings


@dataclass(slots=True)
class Run:
    """A demo under way."""

    settings: Settings
    config: Path
    folder: Path
    engine: str
    steps: int
    started_s: float
    seconds_to_first_step: float = math.nan
    audits: dict[str, Audit] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.settings.run.name
