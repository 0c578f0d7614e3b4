"""calculator: prompts, calls, answers, and that a session can be built anew by the same acts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.environment import rebuildable
from producers.environments import check_environment, make_environment
from producers.environments.calculator import CalculatorSession, calculator, work_out
from schemas.errors import SettingError
from schemas.records import Role, Status


def _open(item: int = 0, **settings: object) -> CalculatorSession:
    return calculator(3, **{"template": "{expression}=", **settings}).open(item, "", 0)  # type: ignore[arg-type]


@given(item=st.integers(0, 10**9), terms=st.integers(1, 8), largest=st.integers(1, 999_999))
def test_the_tools_answer_is_the_right_one_and_earns_the_reward(item: int, terms: int, largest: int) -> None:
    session = _open(item, terms=terms, largest=largest)
    question = session.observe()
    assert question.role is Role.PROMPT
    session.act("?" + question.text.removesuffix("="), truncated=False)
    assert not session.done
    reply = session.observe()
    assert reply.role is Role.TOOL and int(reply.text) == session.expected
    session.act(reply.text, truncated=False)
    verdict = session.verdict()
    assert session.done and (verdict.status, verdict.reward) == (Status.OK, 1.0)
    assert verdict.parts == {"calls": 1.0, "useless_calls": 0.0}


@pytest.mark.parametrize("text", ["", "1/2", "2**9", "x", "1+", "(" * 64, "__import__('os')", "1.5", "True", "9" * 65])
def test_what_is_no_sum_is_not_worked_out(text: str) -> None:
    with pytest.raises(ValueError, match=r"only whole numbers|no expression|at most 64"):
        work_out(text)
    session = _open()
    session.act("?" + text, truncated=False)
    assert session.observe().text == "\n?\n" and session.verdict().parts["useless_calls"] == 1.0


def test_a_wrong_answer_earns_nothing_and_so_does_a_cut_one() -> None:
    session = _open()
    session.act("right", truncated=False)
    assert (session.verdict().status, session.verdict().reward) == (Status.OK, 0.0)
    session = _open()
    session.act("?1+", truncated=True)
    assert session.done and (session.verdict().status, session.verdict().reward) == (Status.TRUNCATED, 0.0)


def test_who_only_calls_has_acted_wrongly() -> None:
    session = _open(max_calls=2)
    for _ in range(3):
        assert not session.done
        session.act("?1+1", truncated=False)
    verdict = session.verdict()
    assert session.done and (verdict.status, verdict.reward) == (Status.INVALID_ACTION, 0.0)
    assert verdict.error == "3 calls and no answer; 2 are allowed"


def test_the_same_acts_give_the_same_session_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("producers.environments.calculator.time.sleep", slept.append)
    here, there = (make_environment("calculator", {"tool_s": 0.5}, 11) for _ in range(2))
    assert rebuildable(here)
    one, two = here.open(4, here.payload(4), 1), there.open(4, "", 2)
    for act in ("?1+1", "?2*(3-9)", "4"):
        assert one.observe() == two.observe()
        one.act(act, False)
        two.act(act, False)
    assert one.verdict() == two.verdict()
    assert slept == [0.5] * 4, "the calculator thinks as long as it is told to"


@pytest.mark.parametrize(
    "settings",
    [
        {"terms": 0},
        {"terms": 9},
        {"largest": 0},
        {"max_calls": -1},
        {"tool_s": -1.0},
        {"template": "{sum}"},
        {"reply": "{"},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="environment 'calculator'"):
        check_environment("calculator", settings, 0)
