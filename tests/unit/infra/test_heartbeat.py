from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import heartbeat
from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.lifecycle import Stop
from infra.log import Ack
from infra.settings import DispatchTable, PolicyTable, RolloutTable, RunTable, Settings
from schemas.codec import decode
from schemas.errors import BrokerError, SendFailed
from schemas.records import Heartbeat, State


class Broker:
    """A log that takes records, is away, or hangs, as the test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bytes | None, Heartbeat]] = []
        self.writers = 0
        self.closed = 0
        self.fails: Exception | None = None
        self.hang = threading.Event()
        self.hang.set()

    def writer(self) -> Broker:
        self.writers += 1
        if isinstance(self.fails, BrokerError):
            raise self.fails
        return self

    def send(self, topic: str, partition: int, value: bytes, key: bytes | None = None) -> Broker:
        self.hang.wait(30)
        if self.fails is not None:
            raise self.fails
        record = decode(value)
        assert isinstance(record, Heartbeat)
        self.sent.append((topic, partition, key, record))
        return self

    def result(self, timeout_s: float) -> Ack:
        return Ack(0, len(self.sent) - 1)

    def close(self) -> None:
        self.closed += 1

    @property
    def states(self) -> list[State]:
        return [record.state for *_, record in self.sent]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(heartbeat, "_BACKOFF_S", (0.01, 0.05))
    made = Broker()
    yield made
    made.hang.set()


def heart(broker: Any, every_s: float = 1000.0) -> Heart:
    table = PolicyTable(
        model=Path("m"),
        rollout=RolloutTable(heartbeat_s=every_s),
        dispatch=DispatchTable(heartbeat_timeout_s=2 * every_s),
    )
    settings = Settings(run=RunTable(name="demo"), policies={"main": table})
    return Heart(Daemon(settings, "main", "w0", "east", broker, broker, Stop()), "rollout")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def beating_until(mine: Heart, condition: Callable[[], object]) -> None:
    def turn() -> object:
        mine.beat()
        return condition()

    until(turn)


def test_a_heartbeat_says_who_where_and_with_what(broker: Broker) -> None:
    mine = heart(broker)
    mine.beat(State.SERVING, {"tokens_per_s": 3.0}, inbox=4, capacity=8, running=2, epoch=1, version=7)
    until(lambda: broker.sent)
    topic, partition, key, record = broker.sent[0]
    assert (topic, partition, key) == ("demo.control", 0, b"rollout/main/w0")
    assert record == Heartbeat(
        run="demo",
        policy="main",
        role="rollout",
        name="w0",
        session=mine.session,
        state=State.SERVING,
        region="east",
        inbox=4,
        capacity=8,
        running=2,
        epoch=1,
        version=7,
        metrics={"tokens_per_s": 3.0},
    )
    mine.close()
    assert broker.states == [State.SERVING, State.LEFT] and broker.closed == 1


def test_every_start_is_a_session_of_its_own(broker: Broker) -> None:
    one, two = heart(broker), heart(broker)
    assert one.session != two.session and len(one.session) == 8 and int(one.session, 16) >= 0
    one.close()
    two.close()


def test_it_is_sent_at_most_once_per_interval_unless_the_state_changes(broker: Broker) -> None:
    mine = heart(broker)
    for _ in range(100):
        mine.beat(State.STARTING)
    until(lambda: broker.sent)
    mine.beat(State.SERVING)
    until(lambda: len(broker.sent) == 2)
    for _ in range(100):
        mine.beat(State.SERVING)
    mine.close()
    assert broker.states == [State.STARTING, State.SERVING, State.LEFT]


def test_a_broker_that_is_away_is_tried_again_with_a_fresh_writer(broker: Broker) -> None:
    broker.fails = BrokerError("away")
    mine = heart(broker, every_s=0.001)
    beating_until(mine, lambda: broker.writers >= 3)
    broker.fails = None
    beating_until(mine, lambda: broker.sent)
    writers = broker.writers
    broker.fails = SendFailed("lost")
    beating_until(mine, lambda: broker.writers > writers + 1)
    assert broker.closed >= 1
    broker.fails = None
    sent = len(broker.sent)
    beating_until(mine, lambda: len(broker.sent) > sent)
    mine.close()


def test_a_broker_that_hangs_holds_nobody_up_and_the_newest_report_counts(broker: Broker) -> None:
    broker.hang.clear()
    mine = heart(broker, every_s=0.0001)
    for number in range(2000):
        mine.beat(running=number)
        if number == 0:
            until(lambda: broker.writers)
    mine.beat(State.DRAINING, running=9999)
    assert not broker.sent
    broker.hang.set()
    until(lambda: len(broker.sent) >= 2)
    mine.close()
    assert [record.running for *_, record in broker.sent[:2]] == [0, 9999]


def test_closing_waits_only_a_little(broker: Broker) -> None:
    broker.hang.clear()
    mine = heart(broker)
    mine.beat()
    mine.close(timeout_s=0.05)
    assert mine._thread.is_alive()


def test_a_bug_in_the_thread_is_met_by_the_daemon(broker: Broker) -> None:
    broker.fails = ZeroDivisionError("a bug")
    mine = heart(broker, every_s=0.0001)
    mine.beat()
    mine._thread.join(20)
    with pytest.raises(ZeroDivisionError):
        mine.beat()
    mine.close()
