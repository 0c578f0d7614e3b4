"""Builders of outcomes for tests of the rules."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.records import KEPT, Member, Outcome, Status, VersionRun


def make_outcome(
    *,
    group: str = "g0",
    members: Sequence[tuple[int, int]] = ((0, 0), (1, 1)),
    closing_offset: int = 1,
    previous: int = -1,
    closing_time_ms: int = 1000,
    lifetime_ms: int = 40_000,
    closed_by: str = "complete",
    partition: int = 0,
    disposition: str = KEPT,
    version: tuple[int, int] = (1, 0),
    policy: str = "main",
) -> Outcome:
    """An outcome with the given (index, offset) members."""
    return Outcome(
        run="demo",
        policy=policy,
        source_run="demo",
        source_policy=policy,
        partition=partition,
        group=group,
        group_size=max(len(members), 1),
        task="t",
        environment="sort-digits",
        item=0,
        closing_offset=closing_offset,
        previous=previous,
        closing_time_ms=closing_time_ms,
        lifetime_ms=lifetime_ms,
        closed_by=closed_by,
        disposition=disposition,
        oldest_version=version[1],
        members=tuple(
            Member(
                index=index,
                attempt=0,
                offset=offset,
                status=Status.OK,
                disposition=KEPT,
                reward=1.0,
                num_tokens=2,
                num_sampled=1,
                temperature=1.0,
                versions=(VersionRun(*version, 1),),
            )
            for index, offset in members
        ),
    )
