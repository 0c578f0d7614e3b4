"""Calls into environments: away from the caller's thread, given up when they hang, and nobody waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from producers.calls import Calls

_LIMIT_S = 20.0


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.close()


def _do(what: Callable[[], Any]) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def job() -> Any:
        return what()

    return job


def _results(calls: Calls, count: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {}
    deadline = threading.Event()
    timer = threading.Timer(_LIMIT_S, deadline.set)
    timer.start()
    while len(found) < count:
        assert not deadline.is_set(), f"only {found} came back"
        calls.wait(0.2)
        found.update(calls.finished())
    timer.cancel()
    return found


def _until(said: Callable[[], bool]) -> None:
    over = threading.Event()
    timer = threading.Timer(_LIMIT_S, over.set)
    timer.start()
    while not said():
        assert not over.is_set(), "did not become so"
        threading.Event().wait(0.01)
    timer.cancel()


def test_many_calls_run_at_once_in_other_threads(calls: Calls) -> None:
    meet = threading.Barrier(8)

    def met() -> int:
        meet.wait(_LIMIT_S)  # breaks unless all eight run at the same time
        return threading.get_ident()

    for number in range(8):
        calls.start(str(number), _do(met))
    found = _results(calls, 8)
    assert len(set(found.values())) == 8 and threading.get_ident() not in found.values()
    calls.start("again", _do(threading.get_ident))
    assert _results(calls)["again"] in found.values(), "a thread that is free is used again"
    assert calls.num_running == calls.num_stuck == 0


def test_what_a_call_raises_is_its_result_even_an_exit(calls: Calls) -> None:
    def leave() -> None:
        raise SystemExit(3)

    calls.start("exit", _do(leave))
    calls.start("error", _do(lambda: 1 / 0))
    found = _results(calls, 2)
    assert isinstance(found["exit"], SystemExit) and isinstance(found["error"], ZeroDivisionError)
    calls.start("next", _do(lambda: "fine"))
    assert _results(calls) == {"next": "fine"}


def test_a_call_that_waits_for_ever_is_left_behind_and_its_late_answer_is_nobodys(calls: Calls) -> None:
    running, release = threading.Event(), threading.Event()

    def hangs() -> None:
        running.set()
        release.wait(60)

    calls.start("a", _do(hangs))
    assert running.wait(_LIMIT_S)
    calls.give_up("a")
    assert (calls.num_running, calls.num_stuck) == (0, 1)
    calls.start("a", _do(lambda: "second"))
    assert _results(calls) == {"a": "second"}
    release.set()
    _until(lambda: calls.num_stuck == 0)
    assert calls.finished() == []
    calls.give_up("never heard of")


def test_a_loop_in_python_is_interrupted(calls: Calls) -> None:
    running = threading.Event()

    def forever() -> None:
        while True:
            running.set()

    calls.start("a", _do(forever))
    assert running.wait(_LIMIT_S)
    calls.give_up("a")
    _until(lambda: calls.num_stuck == 0)


def test_async_calls_share_one_thread(calls: Calls) -> None:
    gate: list[asyncio.Event] = []

    async def opens() -> int:
        while not gate:
            await asyncio.sleep(0.001)
        gate[0].set()
        return threading.get_ident()

    async def waits() -> int:
        gate.append(asyncio.Event())
        await gate[0].wait()
        return threading.get_ident()

    calls.start("waits", waits, on_loop=True)
    calls.start("opens", opens, on_loop=True)
    found = _results(calls, 2)
    assert found["waits"] == found["opens"] != threading.get_ident()


def test_an_async_call_that_hangs_is_cancelled_and_costs_nothing(calls: Calls) -> None:
    cancelled = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    calls.start("a", hangs, on_loop=True)
    calls.start("b", _do(lambda: "b"), on_loop=True)
    assert _results(calls) == {"b": "b"}
    calls.give_up("a")
    assert cancelled.wait(_LIMIT_S)
    assert calls.num_stuck == 0


def test_an_event_loop_that_is_blocked_is_replaced(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.calls._LOOP_ANSWERS_S", -1.0)
    entered, release = threading.Event(), threading.Event()

    def block() -> bool:
        entered.set()
        return release.wait(60)

    calls.start("blocks", _do(block), on_loop=True)
    assert entered.wait(60)  # before that the loop would still answer
    calls.start("victim", _do(lambda: "too late"), on_loop=True)
    calls.give_up("blocks")
    calls.give_up("victim")
    assert calls.num_stuck == 1
    calls.start("next", _do(lambda: "fine"), on_loop=True)
    assert _results(calls) == {"next": "fine"}
    release.set()
    _until(lambda: calls.num_stuck == 0)


def test_a_plain_call_must_not_await(calls: Calls) -> None:
    calls.start("a", lambda: asyncio.sleep(1.0))
    found = _results(calls)["a"]
    assert isinstance(found, TypeError | RuntimeError)


def test_quick_calls_are_waited_for_and_slow_ones_are_not(calls: Calls) -> None:
    for _ in range(50):
        calls.start("quick", _do(lambda: None))
        calls.settle()
        _results(calls) if calls.num_running else calls.finished()
    release = threading.Event()
    for number in range(3):
        calls.start(str(number), _do(lambda: release.wait(0.2)))
        _results(calls)
    calls.start("slow", _do(lambda: release.wait(60)))
    calls.settle()
    assert calls.num_running == 1
    release.set()
    assert _results(calls) == {"slow": True}
