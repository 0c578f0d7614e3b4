"""What an engine has given to one request so far: the bookkeeping that engines of our own share."""

from __future__ import annotations

from dataclasses import dataclass, field

from producers.engine import Generation
from schemas.records import Finish, Version, VersionRun


@dataclass(slots=True)
class Answer:
    """Tokens, their log-probs and who made them; only ever added to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: Version) -> None:
        """Add one token that `version` made.

        >>> answer = Answer()
        >>> for version in (3, 3, 4):
        ...     answer.add(7, -0.5, Version(1, version))
        >>> [(run.version, run.count) for run in answer.runs]
        [(3, 2), (4, 1)]
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.runs and self.runs[-1][:2] == version:
            self.runs[-1] = self.runs[-1]._replace(count=self.runs[-1].count + 1)
        else:
            self.runs.append(VersionRun(*version, 1))

    def generation(self, request_id: str, finish: Finish, old_kv: bool = False) -> Generation:
        """A copy that later tokens leave alone."""
        return Generation(
            id=request_id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.runs),
            finish=finish,
            old_kv=old_kv,
        )
