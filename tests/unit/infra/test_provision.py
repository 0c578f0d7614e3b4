from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from infra import provision, wiring
from infra.log import Bounds, TopicSpec
from infra.provision import OVERHEAD_BYTES, topic_specs
from infra.settings import KafkaTable, PolicyTable, RunTable, Settings
from schemas.errors import SettingError
from schemas.records import Record


class Topics:
    """As much of a log as provisioning needs."""

    def __init__(self) -> None:
        self.specs: dict[str, TopicSpec] = {}
        self.created: list[str] = []

    def topics(self) -> set[str]:
        return set(self.specs)

    def create(self, specs: Iterable[TopicSpec]) -> None:
        for spec in specs:
            self.created.append(spec.name)
            self.specs[spec.name] = spec

    def describe(self, topic: str) -> Mapping[str, str]:
        return {"segment.bytes": "1073741824", **self.specs[topic].config}

    def bounds(self, topic: str) -> dict[int, Bounds]:
        return dict.fromkeys(range(self.specs[topic].partitions), Bounds(0, 0))

    def change(self, topic: str, partitions: int = 0, **config: str) -> None:
        old = self.specs[topic]
        changed = {**old.config, **{key.replace("_", "."): value for key, value in config.items()}}
        self.specs[topic] = TopicSpec(topic, partitions or old.partitions, changed)


def settings(*policies: str, **kafka: Any) -> Settings:
    return Settings(
        run=RunTable(name="demo", partitions=3, inboxes=5),
        kafka=KafkaTable(**kafka),
        policies={name: PolicyTable(model=Path("m")) for name in policies or ("main",)},
    )


@pytest.fixture
def log() -> Any:
    return Topics()


def test_each_policy_has_its_own_topics_and_the_run_has_two() -> None:
    names = [spec.name for spec in topic_specs(settings("main", "two"))]
    assert len(names) == len(set(names)) == 2 + 2 * 8
    assert {"demo.control", "demo.schemas", "demo.main.steps", "demo.two.steps", "demo.two.dead-letters"} <= set(names)


def test_partitions_follow_the_settings() -> None:
    got = {spec.name.removeprefix("demo.main."): spec.partitions for spec in topic_specs(settings())}
    assert {kind: got[kind] for kind in ("requests", "trajectories", "partials", "samples")} == {
        "requests": 5,
        "trajectories": 3,
        "partials": 3,
        "samples": 3,
    }
    assert got["steps"] == got["weights"] == got["dead-letters"] == got["demo.control"] == 1


def test_what_every_topic_has() -> None:
    for spec in topic_specs(settings(max_record_bytes=100_000)):
        assert spec.config["message.timestamp.type"] == "LogAppendTime"
        assert spec.config["compression.type"] == "uncompressed"
        assert int(spec.config["max.message.bytes"]) == 100_000 + OVERHEAD_BYTES
        assert "min.insync.replicas" not in spec.config


def test_three_replicas_wait_for_two() -> None:
    assert {s.config["min.insync.replicas"] for s in topic_specs(settings(replication_factor=3))} == {"2"}


def test_how_long_each_topic_is_kept() -> None:
    config = {spec.name.removeprefix("demo.main."): spec.config for spec in topic_specs(settings())}
    for kind in ("weights", "demo.control", "demo.schemas"):
        assert config[kind]["cleanup.policy"] == "compact" and "retention.ms" not in config[kind]
    day = 24 * 3600 * 1000
    kept = {"requests": day, "partials": day, "trajectories": 30 * day, "samples": 30 * day, "steps": -1, "evals": -1}
    for kind, retention in kept.items():
        assert config[kind]["cleanup.policy"] == "delete" and int(config[kind]["retention.ms"]) == retention
    assert [kind for kind in config if "flush.messages" in config[kind]] == ["steps"]


def test_a_second_time_nothing_is_made_and_nothing_differs(log: Any) -> None:
    assert provision.provision(log, settings()) == []
    made = len(log.created)
    assert made == 10 and provision.provision(log, settings()) == []
    assert len(log.created) == made
    assert provision.provision(log, settings("main", "two")) == [] and len(log.created) == 18


def test_only_what_is_missing_is_made(log: Any) -> None:
    log.create(spec for spec in topic_specs(settings()) if not spec.name.endswith("steps"))
    assert [spec.name for spec in provision.missing(log, settings())] == ["demo.main.steps"]
    provision.provision(log, settings())
    assert provision.missing(log, settings()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("message_timestamp_type", "CreateTime"),
        ("compression_type", "zstd"),
        ("max_message_bytes", "1048588"),
        ("retention_ms", "604800000"),
        ("flush_messages", "9223372036854775807"),
    ],
)
def test_a_setting_that_would_break_a_promise_is_named_with_the_remedy(log: Any, key: str, value: str) -> None:
    provision.provision(log, settings())
    log.change("demo.main.steps", **{key: value})
    (found,) = provision.differences(log, settings())
    name = key.replace("_", ".")
    assert found.startswith(f"demo.main.steps: {name} is {value}, must be ") and f"--add-config {name}=" in found
    with pytest.raises(SettingError, match="not as they must be"):
        provision.ensure(log, settings())


def test_a_larger_limit_is_fine(log: Any) -> None:
    provision.provision(log, settings())
    log.change("demo.main.steps", max_message_bytes=str(2**30))
    assert provision.differences(log, settings()) == []


def test_other_partitions_are_named(log: Any) -> None:
    provision.provision(log, settings())
    log.change("demo.main.samples", partitions=4)
    (found,) = provision.differences(log, settings())
    assert "has 4 partitions, must have 3" in found and "run.partitions = 4" in found


@pytest.mark.broker
def test_a_real_broker_takes_the_topics_as_they_must_be(bootstrap: str) -> None:
    given = Settings(
        run=RunTable(name=f"provision-{secrets.token_hex(4)}", partitions=1, inboxes=2),
        kafka=KafkaTable(bootstrap_servers=bootstrap),
        policies={"main": PolicyTable(model=Path("m"))},
    )
    real = wiring.open_log(given, client_id="test")
    try:
        provision.ensure(real, given)
        assert provision.provision(real, given) == [] and provision.missing(real, given) == []
        assert provision.publish_schemas(real, given) == 0
        assert real.bounds(f"{given.run.name}.schemas")[0].end == len(get_args(Record))
        other = given.model_copy(update={"kafka": KafkaTable(bootstrap_servers=bootstrap, max_record_bytes=2**26)})
        assert len(provision.differences(real, other)) == 10
    finally:
        real.close()
