"""sort-digits: prompts, rewards, and what a remote worker rebuilds from item and seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.environments import check_environment, make_environment
from producers.environments.sort_digits import share_right, sort_digits
from schemas.errors import SettingError
from schemas.records import Role, Status


@given(seed=st.integers(0, 2**40), item=st.integers(0, 10**9), digits=st.integers(1, 12))
def test_right_answer_earns_one_and_two_processes_see_the_same_prompt(seed: int, item: int, digits: int) -> None:
    here, elsewhere = (make_environment("sort-digits", {"digits": digits}, seed) for _ in range(2))
    session, twin = here.open(item, here.payload(item), 1), elsewhere.open(item, here.payload(item), 2)
    observation = session.observe()
    assert observation == twin.observe()
    assert observation.role is Role.PROMPT
    assert observation.text.endswith(">") and len(observation.text) == digits + 1
    assert not session.done
    session.act("".join(sorted(observation.text[:-1])), truncated=False)
    assert session.done
    verdict = session.verdict()
    assert (verdict.status, verdict.reward, verdict.parts["exact"]) == (Status.OK, 1.0, 1.0)


@given(answer=st.text("0123456789x", max_size=12), expected=st.text("0123456789", min_size=1, max_size=8))
def test_share_is_one_only_for_the_answer_and_never_leaves_its_range(answer: str, expected: str) -> None:
    share = share_right(answer, expected)
    assert 0 <= share <= 1
    assert (share == 1) == (answer == expected)
    assert share_right(answer + "x", expected) <= share or len(answer) < len(expected)


def test_superfluous_and_missing_characters_lose_their_places() -> None:
    assert share_right("1234", "1234") == 1
    assert share_right("12345678", "1234") == 0.5
    assert share_right("12", "1234") == 0.5
    assert share_right("", "1234") == 0


def test_truncated_answers_say_so_and_are_rewarded() -> None:
    session = sort_digits(0, digits=2).open(0, "", 0)
    session.act(session.expected + "99", truncated=True)
    assert (session.verdict().status, session.verdict().reward) == (Status.TRUNCATED, 0.5)


def test_items_differ_and_seeds_differ() -> None:
    prompts = {sort_digits(seed, digits=8).open(item, "", 0).digits for seed in range(3) for item in range(50)}
    assert len(prompts) > 140


def test_order_is_the_alphabets_own() -> None:
    session = sort_digits(0, digits=40, alphabet="ba").open(3, "", 0)
    assert session.expected == "b" * session.digits.count("b") + "a" * session.digits.count("a")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"digit": 4}, "did you mean 'digits'"),
        ({"digits": 0}, "at least 1"),
        ({"digits": "5"}, "whole number"),
        ({"digits": True}, "whole number"),
        ({"alphabet": "11"}, "different characters"),
        ({"alphabet": "1>"}, "without '>'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check_environment("sort-digits", settings, 0)


def test_unknown_environments_name_the_nearest() -> None:
    with pytest.raises(SettingError, match="did you mean 'sort-digits'"):
        make_environment("sort-digit", {}, 0)
    with pytest.raises(SettingError, match="PYTHONPATH"):
        make_environment("no_such_package.here:Environment", {}, 0)
    with pytest.raises(SettingError, match="did you mean 'sort_digits'"):
        make_environment("producers.environments.sort_digits:sort_digit", {}, 0)


def test_one_of_your_own_is_found_by_its_path() -> None:
    environment = make_environment("producers.environments.sort_digits:sort_digits", {"digits": 3}, 7)
    assert environment.open(5, "", 0).observe() == sort_digits(7, digits=3).open(5, "", 0).observe()
