"""Sampled transcripts: what a policy read and wrote, with the version that made each token. Decodes by the model's own tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from infra.audit import Audit
from schemas.packing import unpack_floats, unpack_ints
from schemas.records import KEPT, Member, Role


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text; `version` None: it was given to the policy, not sampled."""

    text: str
    version: int | None
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Transcript:
    """One trained member."""

    step: int
    newest: int
    """Newest version of the run, for the colours."""
    reward: float
    advantage: float
    versions: str
    pieces: tuple[Piece, ...]


def sample(found: Audit, model: Path, count: int) -> list[Transcript]:
    """`count` members spread evenly over the steps, in order of training."""
    trained = found.trained_outcomes
    if not trained:
        return []
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    newest = max(version for _, version in found.trained_tokens) if found.trained_tokens else 0
    picks = [trained[round(i * (len(trained) - 1) / max(1, count - 1))] for i in range(min(count, len(trained)))]
    entries = []
    for number, (step, outcome) in enumerate(picks):
        kept = [member for member in outcome.members if member.disposition == KEPT]
        entries.append(transcript(tokenizer, kept[number % len(kept)], step, newest))
    return entries


def transcript(tokenizer: Tokenizer, member: Member, step: int, newest: int) -> Transcript:
    """One member as pieces of text."""
    ids, logprobs = unpack_ints(member.tokens), unpack_floats(member.logprobs)
    roles = [segment.role for segment in member.segments for _ in range(segment.count)]
    makers = [run.version for run in member.versions for _ in range(run.count)]
    pieces, sampled = [], 0
    for token, role in zip(ids.tolist(), roles, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if role is Role.SAMPLED:
            pieces.append(Piece(text, makers[sampled], float(logprobs[sampled])))
            sampled += 1
        else:
            pieces.append(Piece(text, None))
    spans = ", ".join(f"v{run.version}x{run.count}" for run in member.versions)
    return Transcript(step, newest, member.reward or 0.0, member.advantage, spans, tuple(pieces))
