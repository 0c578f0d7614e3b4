"""The processor as a daemon: drains when asked, outlives a broker that is away, says how it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from consumers.processor import Processor, make_processor, run
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Committed, Place, TopicSpec
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from schemas.codec import decode, encode
from schemas.errors import SettingError
from schemas.records import KEPT, Heartbeat, State
from support.processor_scenes import GROUP_SIZE, ROUTE, SOURCE, Event, append, effective, filled, processor, records
from support.samples import trajectory

PLACE = Place(SOURCE, 0)


def _daemon(log: MemoryLog, **process: Any) -> Daemon:
    log.create([TopicSpec("demo.control", 1)])
    policy = {
        "model": "model",
        "process": {"commit_every_s": 0.01, **process},
        "dispatch": {"group_size": GROUP_SIZE},
        "rollout": {"heartbeat_s": 0.01},
    }
    settings = Settings.model_validate({"run": {"name": "demo"}, "policies": {"main": policy}})
    return Daemon(settings, "main", "process", "", log, MemoryStore(), Stop())


def _group(group: str) -> list[Event]:
    fields: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "partition": 0,
        "first_request_time_ms": 1000,
        "lifetime_ms": 10**9,
    }
    return [Event(1000, 0, encode(trajectory(group=group, index=i, reward=i / 2, **fields))) for i in range(GROUP_SIZE)]


@contextmanager
def _running(daemon: Daemon) -> Iterator[list[int]]:
    """The daemon in a thread; the list holds its exit code afterwards."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(daemon)))
    thread.start()
    try:
        yield codes
    finally:
        daemon.stop.request()
        thread.join(30)
        assert not thread.is_alive()


def _until(found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.005)


def test_outcomes_are_written_and_positions_committed_when_asked_to_stop() -> None:
    log = filled(_group("g1"))
    daemon = _daemon(log, commit_every_s=1000.0)
    with _running(daemon) as codes:
        _until(lambda: len(effective(log)) == 1)
        append(log, _group("g2"))
        _until(lambda: len(effective(log)) == 2)
    assert codes == [0]
    assert log.committed("demo.main.process", [PLACE])[PLACE].offset == 6


def test_a_broker_that_is_away_is_waited_for() -> None:
    log = filled(_group("g1"))
    with _running(_daemon(log)) as codes:
        _until(lambda: len(effective(log)) == 1)
        log.away = True
        time.sleep(0.1)
        log.away = False
        append(log, _group("g2"))
        _until(lambda: len(effective(log)) == 2)
    assert codes == [0]
    assert [outcome.disposition for outcome in effective(log)] == [KEPT] * 2


def test_heartbeats_say_what_became_of_groups() -> None:
    log = filled([*_group("g1"), Event(1000, 0, b"poison")])
    with _running(_daemon(log, settings={"zero-spread": {"tol": 2.0}})):
        _until(lambda: len(effective(log)) == 1)
        _until(lambda: any(beat.metrics.get("dead_letters") == 1 for beat in _beats(log)))
    beats = _beats(log)
    assert {beat.role for beat in beats} == {"process"}
    assert beats[-1].state is State.LEFT
    metrics = next(beat.metrics for beat in beats if beat.metrics.get("dead_letters"))
    assert (metrics["outcomes"], metrics["dropped:zero-spread"]) == (1, 1)


def _beats(log: MemoryLog) -> list[Heartbeat]:
    found = [decode(envelope.value) for envelope in records(log, "demo.control")]
    return [record for record in found if isinstance(record, Heartbeat)]


def test_rests_grow_while_errors_last_and_it_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = filled(_group("g1"))
    turning = Processor(processor(log))
    log.away = True
    rests = [turning.turn(0.0) for _ in range(8)]
    assert rests == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert turning.metrics()["restarts"] == 8
    log.away = False
    assert turning.turn(0.0) == 0.0
    assert len(effective(log)) == 1
    assert capsys.readouterr().out.count("assigned again after an error") == 1
    turning.close()


def test_a_commit_that_fails_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    from schemas.errors import BrokerError

    log = filled(_group("g1"))
    turning = Processor(processor(log))

    def fails(group: str, positions: dict[Place, Committed]) -> None:
        raise BrokerError("no coordinator")

    with monkeypatch.context() as patch:
        patch.setattr(log, "commit", fails)
        assert turning.turn(0.0) == 0.0
        turning.drain()
        assert turning.metrics()["failed_commits"] == 1
    append(log, _group("g2"))
    turning.turn(0.0)
    turning.drain()
    assert log.committed("demo.main.process", [PLACE])[PLACE].offset == 6
    assert len(effective(log)) == 2
    turning.close()


def test_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    log = filled([])
    with pytest.raises(SettingError, match="did you mean 'grpo'"):
        run(_daemon(log, advantage="gpro"))
    assert _beats(log) == []


def test_another_route_reads_one_run_and_writes_another() -> None:
    from dataclasses import replace

    log = filled(_group("g1"))
    log.create([TopicSpec("copy.main.samples", 1), TopicSpec("copy.main.dead-letters", 1)])
    turning = make_processor(_daemon(log), replace(ROUTE, run="copy"))
    turning.turn(0.0)
    (envelope,) = records(log, "copy.main.samples")
    outcome = decode(envelope.value)
    assert (outcome.run, outcome.source_run) == ("copy", "demo")  # type: ignore[union-attr]
    turning.drain()
    assert log.committed("copy.main.process", [PLACE])[PLACE].offset == 3
    turning.close()
