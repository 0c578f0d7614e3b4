"""What a dispatcher decides from what it knows: pure, without clock, network or settings object.

Times called `now_s` are seconds of any steady clock. Deadlines are decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from producers.dispatch_fold import DispatchFold, Limits
from producers.groups import Asked, Group, Stray, Worker
from producers.resuming import Chunks, num_fruitless
from schemas.rules import admission

__all__ = ["DispatchState", "Limits"]

_GONE_TRIES = 8
"""A member that kills whatever worker begins it takes no more of them with it."""


class DispatchState(DispatchFold):
    """What to ask, re-issue and close."""

    @property
    def running(self) -> int:
        """Groups requested and not closed."""
        return len(self.groups)

    @property
    def ended(self) -> bool:
        """Whether every step of the run is planned."""
        return bool(self.ledger.ended(self.limits.stop_at))

    def admissible(self) -> int:
        """Groups that may be asked for now. Of tokens and hours nobody knows beforehand how many groups they are."""
        if self.ended:
            return 0
        free = admission.free_groups(
            capacity=self.limits.capacity_groups,
            running=self.running,
            backlog=len(self.backlog),
            batch_groups=self.limits.batch_groups,
            max_staleness=self.limits.max_staleness,
        )
        remaining = admission.remaining_groups(
            steps=self.limits.stop_at.steps,
            steps_planned=self.ledger.steps_planned,
            running=self.running,
            backlog=len(self.backlog),
            batch_groups=self.limits.batch_groups,
        )
        return free if remaining is None else min(free, remaining)

    def next_min_version(self) -> int:
        """Oldest weights for the next group asked for: those of the first step that is not full yet.

        With groups in order this is `admission.target_step`. A group that takes the place of a dropped one is wanted
        by an earlier step than those behind it; asked for as the last of all, it might wait for weights that its own
        step makes.
        """
        limits, planned = self.limits, self.ledger.steps_planned
        for step in range(planned, planned + limits.max_staleness + 1):
            oldest = admission.min_version(step, limits.max_staleness)
            ahead = len(self.backlog) + sum(group.min_version <= oldest for group in self.groups.values())
            if ahead < (step - planned + 1) * limits.batch_groups:
                return oldest
        return admission.min_version(planned + limits.max_staleness, limits.max_staleness)

    def drop_silent(self, now_s: float) -> list[Worker]:
        """Forget workers whose heartbeats stopped; returns them."""
        silent = [w for w in self.workers.values() if now_s - w.seen_s > self.limits.heartbeat_timeout_s]
        for worker in silent:
            del self.workers[worker.session]
        return silent

    def choose_worker(self, members: int, *, avoid: str = "") -> Worker | None:
        """The live worker with the tags that the task requires and most free places for so many members, or None.

        `avoid`: a session that is taken only where there is no other.
        """
        fit = [w for w in self.able() if w.outstanding + members <= max(w.capacity * 2, members)]
        return min(fit, key=lambda w: (w.session == avoid, w.outstanding / max(w.capacity, 1), w.name), default=None)

    def places_for_groups(self) -> int:
        """Whole groups that fit into the free places of workers now; at least one where any worker would take it."""
        size = self.limits.group_size
        free = sum(max(0, 2 * w.capacity - w.outstanding) // size for w in self.able())
        return free or int(self.choose_worker(size) is not None)

    def able(self) -> list[Worker]:
        """Live workers that take requests and have every tag that the task requires."""
        return [w for w in self.workers.values() if not w.draining and self.limits.requires <= w.tags]

    def unasked(self) -> Sequence[tuple[Group, list[int]]]:
        """Groups with members that were never asked for."""
        return [(group, group.missing) for group in self.groups.values() if group.missing and not group.closing]

    def overdue(self, now_s: float) -> list[tuple[Group, int]]:
        """Members to ask for once more: their worker is gone, or nothing was heard of them for too long.

        Only once without progress, see `producers.resuming.num_fruitless`; up to `_GONE_TRIES` times where the worker is
        gone: on borrowed machines a member may die in the queues of several workers before it is begun.
        """
        found = []
        for group in self.groups.values():
            if group.closing:
                continue
            for index, asked in group.asked.items():
                gone = asked.session not in self.workers
                lost = gone or now_s - asked.asked_s > self.limits.reissue_after_s
                if lost and not asked.arrived and self._worth_asking(asked, self._chunks_of(group, index), gone):
                    found.append((group, index))
        return found

    def resume(self, group: Group, index: int) -> tuple[int, ...]:
        """Offsets of the chunks that the next attempt at this member goes on from."""
        return self._chunks_of(group, index).best()

    def _chunks_of(self, group: Group, index: int) -> Chunks:
        return self._chunks.get(group.name, {}).get(index) or Chunks()

    @staticmethod
    def _worth_asking(asked: Asked, chunks: Chunks, gone: bool) -> bool:
        """Whether it was not asked for too often in vain, or the next attempt goes on from more than this one did."""
        if num_fruitless(asked.resumes, chunks) < (_GONE_TRIES if gone else 1):
            return True
        return chunks.num_sampled(chunks.best()) > chunks.num_sampled(asked.resumes.get(asked.attempt, ()))

    def expired(self, now_s: float) -> list[Group]:
        """Groups to close: a lifetime has passed since their youngest member was first asked for."""
        return [
            group
            for group in self.groups.values()
            if not group.closing
            and not group.missing
            and now_s - max(asked.first_s for asked in group.asked.values()) > group.lifetime_ms / 1000
        ]

    def open_groups(self) -> list[Group]:
        """Groups with a member on the log and without a close record."""
        return [group for group in self.groups.values() if group.opened and not group.closing]

    def open_strays(self) -> list[tuple[str, Stray]]:
        """Groups with members on the log that nobody validly asked for, and without a close record."""
        return [(name, s) for name, s in self.strays.items() if not s.closing and name not in self.groups]

    def awaited(self) -> list[Group]:
        """Groups that a live worker may still bring a member of, and that no close record stops."""
        return [
            group
            for group in self.groups.values()
            if not group.closing and any(not a.arrived and a.session in self.workers for a in group.asked.values())
        ]
