"""The trainer's backlog: what counts, what waits, and from where a restart must read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.records import Address, Member
from support.outcomes import make_outcome
from support.samples import dropped_member
from trainers.backlog import Backlog, SamplesPosition, from_start


def filled() -> Backlog:
    """Three kept outcomes and a dropped one in partition 0, with a repeat between them."""
    backlog = Backlog("demo", "main", from_start({0: 0, 1: 0}))
    assert backlog.take(0, 0, 100, make_outcome(closing_offset=5, previous=-1))
    assert backlog.take(0, 1, 110, make_outcome(closing_offset=9, previous=5, disposition="zero-spread"))
    assert not backlog.take(0, 2, 120, make_outcome(closing_offset=5, previous=-1))
    assert backlog.take(0, 3, 130, make_outcome(closing_offset=12, previous=9, version=(2, 4)))
    backlog.skip(0, 4)
    assert backlog.take(0, 5, 140, make_outcome(closing_offset=20, previous=12))
    return backlog


def test_only_kept_outcomes_that_continue_the_chain_wait() -> None:
    backlog = filled()
    assert [w.address for w in backlog.waiting()] == [Address(0, 0, 5, 2), Address(0, 3, 12, 2), Address(0, 5, 20, 2)]
    assert backlog.repeats == 1
    assert [(w.time_ms, w.oldest_version, w.own) for w in backlog.waiting()][1] == (130, 4, True)
    assert backlog.waiting()[1].weights == frozenset({(2, 4)})


def test_outcomes_of_another_partition_do_not_count() -> None:
    backlog = Backlog("demo", "main", from_start({0: 0, 1: 0}))
    assert not backlog.take(1, 0, 100, make_outcome(closing_offset=5, previous=-1, partition=0))


def test_only_kept_members_are_counted_and_judged_by_their_versions() -> None:
    kept: Member = make_outcome(version=(1, 3)).members[0]
    record = replace(make_outcome(), members=(kept, dropped_member()))
    backlog = Backlog("demo", "main", from_start({0: 0}))
    backlog.take(0, 0, 100, record)
    (waiting,) = backlog.waiting()
    assert (waiting.address.num_members, waiting.weights) == (1, frozenset({(1, 3)}))


def test_what_is_named_does_not_wait_and_what_is_done_is_forgotten() -> None:
    backlog = filled()
    first = backlog.waiting()[0].address
    assert first not in [w.address for w in backlog.waiting(named=[first])]
    assert backlog.get(first) is not None
    backlog.done([(0, 5)])
    assert backlog.get(first) is None and len(backlog.waiting()) == 2


@pytest.mark.parametrize("done", [[], [5], [12], [5, 12], [5, 12, 20]])
def test_a_restart_from_the_positions_holds_the_same(done: list[int]) -> None:
    """Records from the stored position on, taken again by a fresh backlog, give what was held."""
    log = {
        0: make_outcome(closing_offset=5, previous=-1),
        1: make_outcome(closing_offset=9, previous=5, disposition="zero-spread"),
        2: make_outcome(closing_offset=5, previous=-1),
        3: make_outcome(closing_offset=12, previous=9, version=(2, 4)),
        5: make_outcome(closing_offset=20, previous=12),
        6: make_outcome(closing_offset=12, previous=9, version=(2, 4)),
        7: make_outcome(closing_offset=31, previous=20),
    }
    backlog = filled()
    backlog.done((0, closing) for closing in done)
    positions = backlog.positions()
    again = Backlog("demo", "main", positions)
    for offset, record in log.items():
        if offset >= positions[0].offset:
            again.take(0, offset, 100, record)
    again.done((0, closing) for closing in done)
    kept = [w.address.closing_offset for w in again.waiting()]
    assert kept == [closing for closing in (5, 12, 20, 31) if closing not in done]


def test_positions_when_nothing_is_held() -> None:
    backlog = filled()
    backlog.done([(0, 5), (0, 12), (0, 20)])
    assert backlog.positions() == {0: SamplesPosition(6, 20), 1: SamplesPosition(0, -1)}


def test_outcomes_of_another_run_have_no_age() -> None:
    backlog = Backlog("copy", "main", from_start({0: 0}))
    backlog.take(0, 0, 100, make_outcome())
    assert not backlog.waiting()[0].own
