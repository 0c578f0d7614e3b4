"""Shares: which of a policy's processors reads which partition, decided from heartbeats by log order. Pure.

Everybody folds the same records of `<run>.control` with their append times, so everybody sees the same processors, and
nobody's own clock counts: "now" is the newest append time. Two that disagree for a while read a partition twice, or
leave it alone until they agree; neither changes an outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.records import Heartbeat, State


@dataclass(slots=True)
class _Session:
    name: str
    time_ms: int


class Members:
    """The processors of one policy that are alive, as a fold over heartbeats in log order.

    A session is alive until it says that it left, until it was silent for `timeout_ms`, or until another session of the
    same name begins; that one took its place, unless it is heard again after that.
    """

    def __init__(self, role: str, policy: str, timeout_ms: int) -> None:
        self._role, self._policy, self._timeout_ms = role, policy, timeout_ms
        self._sessions: dict[str, _Session] = {}
        self._heard: set[str] = set()
        self._now_ms = 0

    def take(self, record: object, time_ms: int) -> None:
        """Fold a record of the control topic; all but heartbeats of this role and policy only tell the time."""
        self._now_ms = max(self._now_ms, time_ms)
        if not isinstance(record, Heartbeat) or (record.role, record.policy) != (self._role, self._policy):
            return
        if record.state is State.LEFT:
            self._sessions.pop(record.session, None)
            return
        if record.session not in self._heard:
            self._heard.add(record.session)
            for session in [s for s, known in self._sessions.items() if known.name == record.name]:
                del self._sessions[session]
        self._sessions[record.session] = _Session(record.name, time_ms)

    def alive(self) -> set[str]:
        """Sessions that are alive at the newest append time."""
        silent = [s for s, known in self._sessions.items() if self._now_ms - known.time_ms > self._timeout_ms]
        for session in silent:
            del self._sessions[session]
        return set(self._sessions)


def shares(num_partitions: int, sessions: Iterable[str]) -> dict[str, set[int]]:
    """Every partition to exactly one session, as evenly as can be, and so that few move when one comes or goes.

    Rendezvous hashing with a bound: a partition goes to the session that scores highest for it among those that have
    room. Anybody who knows the same sessions divides alike.

    >>> shares(4, ["a", "b"])
    {'a': {0, 3}, 'b': {1, 2}}
    >>> shares(2, ["a", "b", "c"])
    {'a': {0}, 'b': set(), 'c': {1}}
    """
    found: dict[str, set[int]] = {session: set() for session in sorted(sessions)}
    if not found:
        return found
    rooms = -(-num_partitions // len(found))
    for partition in range(num_partitions):
        free = [session for session, mine in found.items() if len(mine) < rooms]
        found[max(free, key=lambda session: _score(partition, session))].add(partition)
    return found


def _score(partition: int, session: str) -> tuple[bytes, str]:
    return hashlib.sha256(f"{partition}/{session}".encode()).digest(), session
