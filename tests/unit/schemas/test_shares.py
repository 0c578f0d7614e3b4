"""Shares of partitions: every partition has exactly one owner, evenly, and the living are told by log order alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.records import State
from schemas.rules.shares import Members, shares
from support.samples import claim, heartbeat

SESSIONS = st.sets(st.text("abcdef0123456789", min_size=8, max_size=8), min_size=1, max_size=9)


def _members() -> Members:
    return Members("process", "main", 100)


def _beat(session: str, name: str = "", **changes: object) -> object:
    return heartbeat(**{"role": "process", "name": name or session, "session": session, **changes})


@given(st.integers(1, 40), SESSIONS)
def test_each_partition_has_one_owner_and_nobody_has_two_more_than_another(num: int, sessions: set[str]) -> None:
    found = shares(num, sessions)
    assert found.keys() == sessions
    assert sorted(p for mine in found.values() for p in mine) == list(range(num))
    assert max(map(len, found.values())) == -(-num // len(sessions))
    assert shares(num, sorted(sessions, reverse=True)) == found


@given(st.integers(1, 40), st.text("abcdef", min_size=8, max_size=8))
def test_who_is_alone_has_everything(num: int, session: str) -> None:
    assert shares(num, [session]) == {session: set(range(num))}


def test_nobody_owns_nothing() -> None:
    assert shares(4, []) == {}


def test_the_silent_are_dropped_by_append_times_and_come_back_when_heard() -> None:
    members = _members()
    members.take(_beat("a"), 1000)
    members.take(_beat("b"), 1050)
    assert members.alive() == {"a", "b"}
    members.take(_beat("b"), 1101)
    assert members.alive() == {"b"}
    members.take(_beat("a"), 1102)
    assert members.alive() == {"a", "b"}


def test_anything_on_the_log_tells_the_time() -> None:
    members = _members()
    members.take(_beat("a"), 1000)
    members.take(None, 1099)
    members.take(claim(), 1100)
    assert members.alive() == {"a"}
    members.take(_beat("w", role="rollout"), 1101)
    assert members.alive() == set()


def test_who_left_is_gone_at_once() -> None:
    members = _members()
    members.take(_beat("a"), 1000)
    members.take(_beat("b", state=State.DRAINING), 1000)
    members.take(_beat("a", state=State.LEFT), 1001)
    assert members.alive() == {"b"}


def test_a_successor_takes_the_place_of_its_name_until_the_other_is_heard_again() -> None:
    members = _members()
    members.take(_beat("old", "p"), 1000)
    members.take(_beat("other", "q"), 1000)
    members.take(_beat("new", "p"), 1001)
    assert members.alive() == {"new", "other"}
    members.take(_beat("new", "p"), 1002)
    members.take(_beat("old", "p"), 1003)
    members.take(_beat("new", "p"), 1004)
    members.take(_beat("old", "p"), 1005)
    assert members.alive() == {"old", "new", "other"}  # two processes of one name, both alive


def test_other_roles_and_policies_have_no_share() -> None:
    members = _members()
    members.take(_beat("a", role="rollout"), 1000)
    members.take(_beat("b", policy="other"), 1000)
    assert members.alive() == set()


def test_a_clock_of_the_broker_that_goes_back_leaves_nobody_without_work() -> None:
    members = _members()
    members.take(_beat("a"), 10_000)
    members.take(_beat("b"), 500)
    assert "a" in members.alive()  # and every session counts itself, see consumers.sharing
