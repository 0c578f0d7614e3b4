"""The dead letters of a policy as they stand on the log: each once, by origin, without its bytes.

The topic holds hostile bytes: records on it that are no dead letters are counted and passed over, and repeats (a
processor that was killed writes again what it had not noted) are one letter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.arrivals import Origin, dead_letters, origin
from infra.audit import Source
from infra.log import Log
from schemas.errors import SettingError
from schemas.names import nearest, topic
from schemas.records import DeadLetter, DeadReason


@dataclass(frozen=True, slots=True)
class Letter:
    """What a table says of a dead letter."""

    origin: Origin
    position: int
    """Its own offset on `dead-letters`."""
    time_ms: int
    """Append time of the record at its origin."""
    reason: str
    size_bytes: int
    """Of the value that it holds."""
    copies: int = 1
    """How often it stands on the topic."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters are meant: by reason, by origin. An empty set means any."""

    reasons: frozenset[str] = frozenset()
    origins: frozenset[Origin] = frozenset()

    def has(self, reason: str, at: Origin) -> bool:
        """Whether the letter with this reason and origin is meant."""
        return (not self.reasons or reason in self.reasons) and (not self.origins or at in self.origins)


def collect(
    log: Log, run: str, policy: str, see: Callable[[DeadLetter], None] | None = None
) -> tuple[list[Letter], int]:
    """Every letter once, in order, the first copy counting; and how many records on the topic are no dead letters.

    `see` is called with each letter that counts while its bytes are at hand.
    """
    found: dict[Origin, Letter] = {}
    strangers = 0
    for position, letter in dead_letters(log, run, policy):
        if letter is None:
            strangers += 1
        elif (known := found.get(at := origin(letter))) is not None:
            found[at] = dataclasses.replace(known, copies=known.copies + 1)
        else:
            found[at] = Letter(at, position, letter.time_ms, letter.reason, len(letter.value or b""))
            if see is not None:
                see(letter)
    return list(found.values()), strangers


def parse_origin(text: str, source: Source) -> Origin:
    """An origin as people write it: `PARTITION:OFFSET` on the policy's trajectories, or `TOPIC/PARTITION/OFFSET`.

    >>> str(parse_origin("1:118", Source("demo", "main")))
    'demo.main.trajectories/1/118'
    """
    if found := re.fullmatch(r"(?:([a-z0-9.-]{1,249})/)?(\d{1,9})[:/](\d{1,18})", text):
        name = found[1] or topic(source.run, source.policy, "trajectories")
        return Origin(name, int(found[2]), int(found[3]))
    raise SettingError(
        f"{text!r} is no place of a record: write PARTITION:OFFSET, such as 0:17, or TOPIC/PARTITION/OFFSET"
    )


def check_reasons(reasons: Iterable[str]) -> frozenset[str]:
    """The reasons, if they are. Raises SettingError naming the nearest."""
    known = [reason.value for reason in DeadReason]
    reasons = list(reasons)
    for reason in reasons:
        if reason not in known:
            raise SettingError(f"there is no reason {reason!r}; {nearest(reason, known)}")
    return frozenset(reasons)
