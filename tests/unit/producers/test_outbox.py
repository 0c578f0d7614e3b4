"""The outbox: nothing is forgotten unacknowledged, order is kept, and no call waits for a broker that is away."""

from __future__ import annotations

import itertools
import time

import pytest
import structlog

from infra.log import TopicSpec, Writer
from infra.memory_log import MemoryLog
from producers.outbox import Outbox
from support.processor_scenes import records


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr("producers.outbox._BACKOFF_S", (0.0, 0.0))
    made = MemoryLog(max_record_bytes=1000)
    made.create([TopicSpec("t", 1)])
    return made


def put(outbox: Outbox, *names: str) -> None:
    for name in names:
        outbox.put("t", 0, name.encode(), b"k")


def values(log: MemoryLog) -> list[str]:
    return [(envelope.value or b"").decode() for envelope in records(log, "t")]


def test_records_are_sent_in_order_and_forgotten_when_acknowledged(log: MemoryLog) -> None:
    outbox = Outbox(log)
    put(outbox, "a", "b", "c")
    outbox.settle()
    assert values(log) == ["a", "b", "c"]
    assert (len(outbox), outbox.acknowledged) == (0, 3)


@pytest.mark.parametrize("present", [False, True])
def test_a_failed_record_is_sent_again_before_those_behind_it(log: MemoryLog, present: bool) -> None:
    outbox = Outbox(log)
    log.stall()
    put(outbox, "a", "b", "c")
    log.fail_sends(1, present=present)
    log.resume()
    assert outbox.drain(5.0)
    found = values(log)
    assert list(dict.fromkeys(found)) == ["a", "b", "c"]
    assert found.count("a") == 1 + present
    assert outbox.acknowledged == 3


def test_a_broker_that_is_away_keeps_everything_and_holds_nobody_up(
    log: MemoryLog, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = Outbox(log)
    log.away = True
    for n in range(50):
        put(outbox, str(n))
    assert len(outbox) == 50
    log.away = False
    assert outbox.drain(5.0)
    assert values(log) == [str(n) for n in range(50)]
    assert capsys.readouterr().out.count("disturbed") == 1, "said once"


def test_a_long_outage_does_not_end_the_process(log: MemoryLog) -> None:
    outbox = Outbox(log)
    log.away = True
    put(outbox, "a")
    for _ in range(1500):  # 2.0 ** 1500 is no float
        outbox.settle()
    log.away = False
    assert outbox.drain(5.0) and values(log) == ["a"]


def test_rests_grow_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    log.create([TopicSpec("t", 1)])
    asked: list[float] = []
    clock = type("clock", (), {"monotonic": staticmethod(lambda: now[0]), "sleep": time.sleep})
    now = [0.0]
    monkeypatch.setattr("producers.outbox.time", clock)
    outbox = Outbox(log)
    log.away = True
    real = log.writer

    def writer() -> Writer:
        asked.append(now[0])
        return real()

    monkeypatch.setattr(log, "writer", writer)
    put(outbox, "a")
    for _ in range(400):
        now[0] += 0.1
        outbox.settle()
    gaps = [round(after - before, 1) for before, after in itertools.pairwise(asked)]
    assert gaps[:5] == sorted(gaps[:5]) and max(gaps) <= 5.2, gaps


def test_only_a_window_of_bytes_is_handed_to_the_writer(log: MemoryLog) -> None:
    outbox = Outbox(log, window_bytes=250)
    log.stall()
    for n in range(6):
        put(outbox, str(n) * 100)
    assert len(outbox) == 6
    log.resume()
    assert log.bounds("t")[0].end == 2
    assert outbox.drain(5.0)
    assert [value[0] for value in values(log)] == list("012345")


def test_a_record_that_is_too_large_is_refused_and_the_others_go_on(log: MemoryLog) -> None:
    outbox = Outbox(log)
    put(outbox, "a", "b" * 2000, "c")
    outbox.settle()
    assert values(log) == ["a", "c"]
    assert (outbox.refused, len(outbox)) == (1, 0)


def test_what_is_refused_is_named_with_its_size_and_the_limit(log: MemoryLog) -> None:
    outbox = Outbox(log)
    with structlog.testing.capture_logs() as said:
        outbox.put("t", 0, b"b" * 2000, b"g00000001", "g00000001/2/0")
    (line,) = said
    assert line["record"] == "g00000001/2/0" and "2000 bytes" in line["error"] and "limit" in line["error"]


def test_draining_ends_at_its_limit(log: MemoryLog) -> None:
    outbox = Outbox(log)
    log.stall()
    put(outbox, "a")
    assert not outbox.drain(0.05)
    outbox.close()
    assert log.bounds("t")[0].end == 0
