"""What `offsetrl status` shows: servers as lines, daemons by their last heartbeat."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from infra.log import Envelope, Log, Place
from infra.ownership import read_record
from infra.settings import Settings
from infra.train_settings import TrainTable
from schemas.codec import decode
from schemas.errors import DeadlineExceeded, RecordError
from schemas.names import control_topic, topic
from schemas.records import Eval, Heartbeat, State
from schemas.rules.evals import first_evals, in_short


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
    control = control_topic(settings.run.name)
    if control not in log.topics():
        return []
    latest: dict[bytes, tuple[Heartbeat, int]] = {}
    for envelope in read_all(log, Place(control, 0), settings.kafka.patience_s):
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
        "backlog": against_gate(heartbeat, table.train) if table and heartbeat.role == "train" else "-",
    }


def against_gate(heartbeat: Heartbeat, table: TrainTable) -> str:
    """A trainer's kept and unplanned groups, of a batch, against how many may be asked for ahead.

    >>> beat = Heartbeat(run="r", policy="p", role="train", name="train", session="s", state=State.SERVING,
    ...     metrics={"waiting_groups": 5.0})
    >>> against_gate(beat, TrainTable(batch_groups=16, max_staleness=2))
    '5 of 16 groups, gate 48'
    """
    waiting = heartbeat.metrics.get("waiting_groups", 0.0)
    gate = (table.max_staleness + 1) * table.batch_groups
    return f"{waiting:.0f} of {table.batch_groups} groups, gate {gate}"


def evaluations(log: Log, settings: Settings) -> list[dict[str, Any]]:
    """The newest evaluation of each policy, task and split."""
    there, rows = log.topics(), []
    for policy in settings.policies:
        if (name := topic(settings.run.name, policy, "evals")) not in there:
            continue
        records = (read_record(envelope) for envelope in read_all(log, Place(name, 0), settings.kafka.patience_s))
        counted = first_evals(record for record in records if isinstance(record, Eval))
        newest: dict[tuple[str, str], Eval] = {}
        for about, record in sorted(counted.items(), key=lambda item: (item[0].name.version, item[0].name.epoch)):
            newest[about.task, about.split] = record
        rows += [{"policy": policy, "task": task, **in_short(record)} for (task, _), record in newest.items()]
    return rows


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
