"""The processor's partitions on a real broker: groups, poison, two one after the other, shares, lost positions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra import provision
from infra.kafka_log import KafkaLog
from infra.log import Place
from infra.provision import topic_specs
from infra.settings import Settings
from schemas import codec
from schemas.codec import decode, encode
from schemas.records import KEPT, DeadLetter, Outcome, Trajectory
from support.generations import another, publish, published, written
from support.processor_scenes import POISON
from support.samples import close, trajectory

pytestmark = pytest.mark.broker


@pytest.fixture
def log(bootstrap: str) -> Iterator[KafkaLog]:
    found = KafkaLog(bootstrap)
    yield found
    found.close()


def _partitions(log: KafkaLog, run: str) -> Partitions:
    route = Route(run=run, policy="main", source_run=run, source_policy="main")
    recipe = make_recipe(group_filters=["zero-spread"], min_members=2, group_size=3)
    return Partitions(log, route, recipe, patience_s=20.0, commit_every_s=0.0, max_tokens=10**6)


def _send(log: KafkaLog, topic: str, partition: int, values: list[bytes]) -> None:
    writer = log.writer()
    for value in values:
        writer.send(topic, partition, value)
    writer.flush(20.0)
    writer.close()


def _group(run: str, group: str, partition: int, indices: tuple[int, ...] = (0, 1, 2)) -> list[bytes]:
    now_ms = time.time_ns() // 1_000_000
    base = {"run": run, "group": group, "group_size": 3, "partition": partition, "first_request_time_ms": now_ms}
    return [encode(trajectory(**base, index=index, lifetime_ms=600_000, reward=index / 2)) for index in indices]


def _work_off(log: KafkaLog, partitions: Partitions, source: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        partitions.work(0.2)
        if all(partitions.positions[p] >= bounds.end for p, bounds in log.bounds(source).items()):
            return
    raise AssertionError("the end of the log was never reached")


def _values(log: KafkaLog, topic: str) -> list[object]:
    bounds = log.bounds(topic)
    reader = log.reader({Place(topic, p): at.start for p, at in bounds.items()})
    found: list[object] = []
    while any(reader.position(Place(topic, p)) < at.end for p, at in bounds.items()):
        found += [decode(envelope.value) for envelope in reader.poll(1.0)]
    reader.close()
    return found


def test_groups_poison_and_a_successor(log: KafkaLog) -> None:
    run = f"process-{secrets.token_hex(4)}"
    settings = Settings.model_validate({"run": {"name": run}, "policies": {"main": {"model": "m"}}})
    log.create(topic_specs(settings))
    source = f"{run}.main.trajectories"
    poison = [value for value in POISON.values() if value is not None]
    _send(log, source, 0, [*_group(run, "g0", 0)[:2], *poison, *_group(run, "g2", 0)])
    _send(log, source, 1, _group(run, "g1", 1))
    first = _partitions(log, run)
    _work_off(log, first, source)
    _send(log, source, 0, [*_group(run, "g0", 0)[2:], encode(close(run=run, group="g2", partition=0))])
    second = _partitions(log, run)
    _work_off(log, second, source)
    _work_off(log, first, source)  # it was only slow: what it writes now are repeats
    outcomes = [record for record in _values(log, f"{run}.main.samples") if isinstance(record, Outcome)]
    found = sorted({(o.group, o.partition, o.disposition, o.previous < o.closing_offset) for o in outcomes})
    assert found == [("g0", 0, KEPT, True), ("g1", 1, KEPT, True), ("g2", 0, KEPT, True)]
    assert [o.group for o in outcomes].count("g0") == 2  # both wrote it; the chain takes the first
    letters = [record for record in _values(log, f"{run}.main.dead-letters") if isinstance(record, DeadLetter)]
    assert [letter.value for letter in letters] == poison
    assert (
        log.committed(f"{run}.main.process", [Place(source, 0)])[Place(source, 0)].offset == log.bounds(source)[0].end
    )
    first.discard()
    second.discard()


def test_another_releases_records_before_and_while_it_runs(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schemas of an older release stand there when it starts; a newer one comes later."""
    monkeypatch.setattr(codec, "_READERS", dict(codec._READERS))
    run = f"process-{secrets.token_hex(4)}"
    settings = Settings.model_validate({"run": {"name": run}, "policies": {"main": {"model": "m"}}})
    log.create(topic_specs(settings))
    older, newer = another(Trajectory), another(Trajectory, colour="shade")
    publish(log, run, published(older), b"no schema")
    provision.ensure(log, settings)
    source = f"{run}.main.trajectories"
    members = _group(run, "g0", 0)
    _send(log, source, 0, [written(older, members[0]), members[1]])
    partitions = _partitions(log, run)
    _work_off(log, partitions, source)
    publish(log, run, published(newer))
    _send(log, source, 0, [written(newer, members[2])])
    _work_off(log, partitions, source)
    outcomes = [record for record in _values(log, f"{run}.main.samples") if isinstance(record, Outcome)]
    assert [(o.group, [m.offset for m in o.members], o.disposition) for o in outcomes] == [("g0", [0, 1, 2], KEPT)]
    assert log.bounds(f"{run}.main.dead-letters")[0].end == 0
    assert provision.publish_schemas(log, settings) == 0, "they were published when it started"
    partitions.discard()


def test_shares_and_lost_positions(log: KafkaLog) -> None:
    """Two share the partitions; one leaves; all stored positions are lost: the outcomes stay the same."""
    run = f"shares-{secrets.token_hex(4)}"
    settings = Settings.model_validate({"run": {"name": run}, "policies": {"main": {"model": "m"}}})
    log.create(topic_specs(settings))
    source = f"{run}.main.trajectories"
    for partition in (0, 1):
        _send(log, source, partition, _group(run, f"g{partition}", partition))
    one, two = _partitions(log, run), _partitions(log, run)
    one.own({0})
    two.own({1})
    deadline_s = time.monotonic() + 60
    while {**one.positions, **two.positions} != {0: 3, 1: 3}:
        assert time.monotonic() < deadline_s
        one.work(0.2)
        two.work(0.2)
    two.own(set())
    assert two.work(0.0) == 0
    one.own({0, 1})
    for partition in (0, 1):
        _send(log, source, partition, _group(run, f"h{partition}", partition))
    _work_off(log, one, source)
    heir = _partitions(log, run)
    heir._group = f"{run}.main.elsewhere"  # nothing is stored under this name
    for partition in (0, 1):
        _send(log, source, partition, _group(run, f"i{partition}", partition))
    _work_off(log, heir, source)
    outcomes = [record for record in _values(log, f"{run}.main.samples") if isinstance(record, Outcome)]
    assert sorted(o.group for o in outcomes) == ["g0", "g1", "h0", "h1", "i0", "i1"]
    for partitions in (one, two, heir):
        partitions.discard()
