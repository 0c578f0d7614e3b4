"""An engine that knows more with every version: it sorts the digits of a share version / 10 of its requests, by their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.settings import RolloutTable
from producers.engine import GenerationRequest
from producers.engines.scripted_engine import ScriptedEngine
from schemas.records import Version
from support.loop import ALPHABET, EOS

LOADED: list[tuple[Version, Path]] = []
"""Every set of weights that such an engine was given, in order."""


class GradedEngine(ScriptedEngine):
    """Right for a share of the requests, and the same ones for the same version."""

    def __init__(self, version: Version, table: RolloutTable) -> None:
        super().__init__(
            version,
            answer=self._rule,
            vocab_size=EOS + 1,
            stop_ids=(EOS,),
            max_model_len=table.max_model_len,
            max_running=table.concurrency,
        )

    def load(self, folder: Path, version: Version) -> None:
        LOADED.append((version, folder))
        super().load(folder, version)

    def _rule(self, request: GenerationRequest) -> Sequence[int]:
        digits = sorted(token for token in request.prompt if token != ALPHABET.index(">"))
        knows = request.seed % 10 < self.version.version
        return [*(digits if knows else [ALPHABET.index(">")]), EOS]


def make(folder: Path, version: Version, table: RolloutTable) -> GradedEngine:
    """The engine, with its first weights."""
    LOADED.append((version, folder))
    return GradedEngine(version, table)
