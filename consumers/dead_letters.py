"""What could not be read becomes a dead letter: its original bytes, where it stood, and why."""

from __future__ import annotations

import dataclasses
import hashlib

from infra.log import CORRUPT_HEADER, Envelope
from schemas.errors import RecordError
from schemas.records import DeadLetter

_DETAIL_CHARS = 2000
_KEPT_BYTES = 16 * 1024


def dead_letter(envelope: Envelope, error: RecordError, *, run: str, policy: str) -> DeadLetter:
    """The dead letter of a record; of one in a broken batch, with its bytes as they were found."""
    found = next((value for name, value in envelope.headers if name == CORRUPT_HEADER), None)
    return DeadLetter(
        run=run,
        policy=policy,
        topic=envelope.topic,
        partition=envelope.partition,
        offset=envelope.offset,
        time_ms=envelope.time_ms,
        reason=str(error.reason),
        detail=error.detail[:_DETAIL_CHARS],
        key=envelope.key,
        value=envelope.value if found is None else found,
        headers=tuple((name, value) for name, value in envelope.headers if name != CORRUPT_HEADER),
    )


def cut(letter: DeadLetter) -> DeadLetter:
    """The same letter with only the beginning of its bytes, their number and digest in the detail."""
    value = letter.value or b""
    said = f"{letter.detail} [cut: {len(value)} bytes, SHA-256 {hashlib.sha256(value).hexdigest()}]"
    return dataclasses.replace(letter, value=value[:_KEPT_BYTES], detail=said)
