"""Makes the topics of a run and checks that the ones there are as they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from infra.log import Log, Place, TopicSpec
from infra.settings import Settings
from infra.writers import learn
from schemas.codec import encode, fingerprint, schema_text
from schemas.errors import SettingError
from schemas.names import KINDS, control_topic, schemas_topic, topic
from schemas.records import Record, SchemaText

OVERHEAD_BYTES = 64 * 1024
"""What a batch adds to the largest record; the topic's limit is on the batch."""
_DAY_MS = 24 * 3600 * 1000
_DELETE_AFTER_MS = {
    "requests": _DAY_MS,
    "trajectories": 30 * _DAY_MS,
    "partials": _DAY_MS,
    "samples": 30 * _DAY_MS,
    "steps": -1,
    "dead-letters": 30 * _DAY_MS,
    "evals": -1,
}
# Compaction leaves the active segment alone, so small topics need short ones or they are never compacted.
_COMPACT = {"cleanup.policy": "compact", "segment.ms": str(10 * 60 * 1000), "min.cleanable.dirty.ratio": "0.1"}


def topic_specs(settings: Settings) -> list[TopicSpec]:
    """Every topic of the run with its configuration."""
    run = settings.run
    partitions = {"requests": run.inboxes, **dict.fromkeys(("trajectories", "partials", "samples"), run.partitions)}
    specs = [
        TopicSpec(name, 1, {**_common(settings), **_COMPACT})
        for name in (control_topic(run.name), schemas_topic(run.name))
    ]
    for policy in settings.policies:
        for kind in KINDS:
            config = {**_common(settings), **_kept(kind)}
            specs.append(TopicSpec(topic(run.name, policy, kind), partitions.get(kind, 1), config))
    return specs


def _common(settings: Settings) -> dict[str, str]:
    """What all topics share. With producers' own time, a worker with a slow clock would have its records deleted."""
    kafka = settings.kafka
    config = {
        "message.timestamp.type": "LogAppendTime",
        "compression.type": "uncompressed",
        "max.message.bytes": str(kafka.max_record_bytes + OVERHEAD_BYTES),
    }
    if kafka.replication_factor >= 3:
        config["min.insync.replicas"] = "2"
    return config


def _kept(kind: str) -> dict[str, str]:
    if kind == "weights":
        return _COMPACT
    config = {"cleanup.policy": "delete", "retention.ms": str(_DELETE_AFTER_MS[kind])}
    return {**config, "flush.messages": "1"} if kind == "steps" else config


def missing(log: Log, settings: Settings) -> list[TopicSpec]:
    """Topics of the run that do not exist yet."""
    there = log.topics()
    return [spec for spec in topic_specs(settings) if spec.name not in there]


def provision(log: Log, settings: Settings) -> list[str]:
    """Make the topics that are missing, then say how those there differ from what they must be; [] when all is well.

    May be called at any time and by several processes at once. Raises SettingError where a topic has other partitions.
    """
    if wanted := missing(log, settings):
        log.create(wanted)
    return differences(log, settings)


def differences(log: Log, settings: Settings) -> list[str]:
    """How existing topics differ, each in a sentence that says what to do."""
    there = log.topics()
    found: list[str] = []
    for spec in topic_specs(settings):
        if spec.name in there:
            found += _partitions(log, spec)
            found += [
                f"{spec.name}: {key} is {got}, must be {want}: set it with your Kafka's tools "
                f"(kafka-configs.sh --alter --topic {spec.name} --add-config {key}={want})"
                for key, got, want in _differing(log.describe(spec.name), spec.config)
            ]
    return found


def _partitions(log: Log, spec: TopicSpec) -> list[str]:
    got = len(log.bounds(spec.name))
    if got == spec.partitions:
        return []
    setting = "run.inboxes" if spec.name.endswith(".requests") else "run.partitions"
    return [
        f"{spec.name}: has {got} partitions, must have {spec.partitions}: partitions are fixed for a run; "
        f"set {setting} = {got}, or give the run another name"
    ]


def _differing(got: Mapping[str, str], want: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(key, got, wanted) of settings that matter and differ; a larger limit on records is fine."""
    pairs = ((key, got.get(key, "not known"), value) for key, value in want.items())
    return [(key, now, value) for key, now, value in pairs if now != value and not _larger(key, now, value)]


def _larger(key: str, got: str, want: str) -> bool:
    return key in ("max.message.bytes", "min.insync.replicas") and got.isdigit() and int(got) >= int(want)


def ensure(log: Log, settings: Settings) -> None:
    """Make what is missing, refuse to go on with topics that would break a promise, learn and publish writers' schemas.

    Raises SettingError.
    """
    found = provision(log, settings)
    if found:
        raise SettingError("the topics of this run are not as they must be:\n  - " + "\n  - ".join(found))
    publish_schemas(log, settings)


def publish_schemas(log: Log, settings: Settings) -> int:
    """Learn what stands on `<run>.schemas`, and put those that this code writes there where they are missing; how many.

    Each has its fingerprint as key, so older ones stay: what their writers wrote can be read as long as it is kept.
    """
    run = settings.run.name
    place = Place(schemas_topic(run), 0)
    there = learn(log, settings).standing[run]
    schemas = {fingerprint(kind).hex(): (kind.__name__, schema_text(kind)) for kind in get_args(Record)}
    wanted = {mark: found for mark, found in schemas.items() if mark not in there}
    if wanted:
        writer = log.writer()
        try:
            for mark, (name, text) in wanted.items():
                record = SchemaText(name=name, fingerprint=mark, text=text)
                writer.send(place.topic, place.partition, encode(record), key=mark.encode())
            writer.flush(settings.kafka.patience_s)
        finally:
            writer.close()
    return len(wanted)
