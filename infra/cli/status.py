"""What `offsetrl status` shows: servers as lines, daemons by their last heartbeat."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from infra.log import Envelope, Log, Place
from infra.settings import Settings
from schemas.codec import decode
from schemas.errors import DeadlineExceeded, RecordError
from schemas.names import control_topic
from schemas.records import Heartbeat, State


def server_rows(servers: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per embedded server."""
    rows = []
    for server in servers:
        state = "serves" if server["answers"] else "starts or hangs" if server["pid"] else "does not run"
        rows.append(
            f"embedded {server['name']:<6} {state:<16} port {server['port'] or '-'}  pid {server['pid'] or '-'}"
        )
    return rows


def daemons(log: Log, settings: Settings) -> list[dict[str, Any]]:
    """The last heartbeat of each daemon of the run, newest session first within a role."""
    topic = control_topic(settings.run.name)
    if topic not in log.topics():
        return []
    latest: dict[bytes, tuple[Heartbeat, int]] = {}
    for envelope in read_all(log, Place(topic, 0), settings.kafka.patience_s):
        try:
            record = decode(envelope.value)
        except RecordError:
            continue  # a record of a newer release is no reason to show nothing
        if isinstance(record, Heartbeat) and envelope.key is not None:
            latest[envelope.key] = (record, envelope.time_ms)
    now_ms = time.time() * 1000
    return [_row(heartbeat, (now_ms - sent_ms) / 1000, settings) for _, (heartbeat, sent_ms) in sorted(latest.items())]


def _row(heartbeat: Heartbeat, age_s: float, settings: Settings) -> dict[str, Any]:
    table = settings.policies.get(heartbeat.policy)
    limit_s = table.dispatch.heartbeat_timeout_s if table else float("inf")
    silent = heartbeat.state != State.LEFT and age_s > limit_s
    return {
        "role": heartbeat.role,
        "policy": heartbeat.policy,
        "name": heartbeat.name,
        "region": heartbeat.region or "-",
        "state": "silent" if silent else heartbeat.state.value,
        "seen_s_ago": round(age_s, 1),
        "version": f"{heartbeat.epoch}-{heartbeat.version}" if heartbeat.version >= 0 else "-",
        "running": heartbeat.running,
    }


def read_all(log: Log, place: Place, patience_s: float) -> list[Envelope]:
    """Everything that stands in a partition now."""
    start, end = log.bounds(place.topic)[place.partition]
    found: list[Envelope] = []
    deadline = time.monotonic() + patience_s
    reader = log.reader({place: start})
    try:
        while reader.position(place) < end:
            found += reader.poll(0.2)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{place.topic} could not be read to offset {end} within {patience_s:g} s")
    finally:
        reader.close()
    return found
