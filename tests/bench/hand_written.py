"""The same loop as ours, as one writes it by hand on the bare client: dicts, fastavro, a dict of groups, offsets committed.

Nothing is checked, nothing survives a crash well, and nobody is told what went wrong: it is what the price of ours is
measured against. The records are ours to the byte, so both sides carry the same work.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable
from typing import Any

import fastavro
import numpy as np
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata

from bench.broker import PATIENCE_S, Broker
from schemas import codec
from schemas.records import Outcome, Role, Trajectory
from schemas.wire import ROLES, pack_segments, pack_versions

TRAJECTORY = fastavro.parse_schema(json.loads(codec.schema_text(Trajectory)))
OUTCOME = fastavro.parse_schema(json.loads(codec.schema_text(Outcome)))
HEADS = {kind: codec.MARKER + codec.fingerprint(kind) for kind in (Trajectory, Outcome)}
SAMPLED = ROLES.index(Role.SAMPLED)
MAX_RECORDS = 1000
Datum = dict[str, Any]


def plain(record: Trajectory) -> Datum:
    """A trajectory as the dict that fastavro writes; segments and versions stay tuples, packed at every send."""
    datum: Datum = {name: getattr(record, name) for name in record.__slots__}
    datum["sampling"] = {name: getattr(record.sampling, name) for name in record.sampling.__slots__}
    return datum


def encode(schema: Any, head: bytes, datum: Datum) -> bytes:
    """Dict to bytes."""
    buffer = io.BytesIO()
    buffer.write(head)
    fastavro.schemaless_writer(buffer, schema, datum)
    return buffer.getvalue()


def decode(schema: Any, data: bytes) -> Datum:
    """Bytes to dict."""
    body = io.BytesIO(data)
    body.seek(codec.HEADER_BYTES)
    found: Datum = fastavro.schemaless_reader(body, schema, None)
    return found


def advantages(rewards: list[float]) -> list[float] | None:
    """GRPO; None where all rewards are equal.

    >>> [round(one, 4) for one in advantages([1.0, 0.0])], advantages([1.0, 1.0])
    ([0.7071, -0.7071], None)
    """
    values = np.array(rewards, dtype=np.float64)
    if values.max() == values.min():
        return None
    scores: list[float] = ((values - values.mean()) / (values.std(ddof=1) + 1e-6)).tolist()
    return scores


class HandWritten:
    """One process that plays worker, processor and trainer."""

    def __init__(self, found: Broker, topics: tuple[str, str], partitions: int, commit_every_s: float) -> None:
        self._trajectories, self._samples = topics
        self._producer = found.bare(KafkaProducer)
        self._inbound = found.bare(KafkaConsumer, group_id=f"{self._trajectories}-by-hand")
        self._outbound = found.bare(KafkaConsumer)
        for consumer, topic in ((self._inbound, self._trajectories), (self._outbound, self._samples)):
            places = [TopicPartition(topic, partition) for partition in range(partitions)]
            consumer.assign(places)
            for place in places:
                consumer.seek(place, 0)
        self._groups: dict[str, list[tuple[int, Datum]]] = {}
        self._commit_every_s, self._next_commit_s = commit_every_s, 0.0
        self._positions: dict[int, int] = {}

    def roll_out(self, records: Iterable[Datum]) -> None:
        """Write and send; every acknowledgement is awaited."""
        futures = []
        for record in records:
            datum = {**record, "segments": pack_segments(record["segments"])}
            datum["versions"] = pack_versions(record["versions"])
            value = encode(TRAJECTORY, HEADS[Trajectory], datum)
            key = record["group"].encode()
            futures.append(self._producer.send(self._trajectories, value, key=key, partition=record["partition"]))
        for future in futures:
            future.get(PATIENCE_S)

    def process(self, count: int) -> None:
        """Read this many trajectories; send the outcomes of the groups that they complete."""
        while count > 0:
            futures = []
            for place, records in self._inbound.poll(timeout_ms=250, max_records=MAX_RECORDS).items():
                for record in records:
                    outcome = self._add(record)
                    if outcome is not None:
                        value = encode(OUTCOME, HEADS[Outcome], outcome)
                        key = outcome["group"].encode()
                        futures.append(self._producer.send(self._samples, value, key=key, partition=place.partition))
                count -= len(records)
                self._positions[place.partition] = records[-1].offset + 1
            for future in futures:
                future.get(PATIENCE_S)
            if time.monotonic() >= self._next_commit_s:
                self._next_commit_s = time.monotonic() + self._commit_every_s
                self._commit()

    def _commit(self) -> None:
        held: dict[int, int] = {}
        for members in self._groups.values():
            offset, first = members[0]
            held[first["partition"]] = min(offset, held.get(first["partition"], offset))
        self._inbound.commit(
            {
                TopicPartition(self._trajectories, partition): OffsetAndMetadata(held.get(partition, position), "", -1)
                for partition, position in self._positions.items()
            }
        )

    def _add(self, record: Any) -> Datum | None:
        datum = decode(TRAJECTORY, record.value)
        members = self._groups.setdefault(datum["group"], [])
        members.append((record.offset, datum))
        if len(members) < datum["group_size"]:
            return None
        del self._groups[datum["group"]]
        members.sort(key=lambda pair: pair[1]["index"])
        return outcome_of(members, record.offset, record.timestamp)

    def train(self, count: int) -> tuple[int, float]:
        """Read this many outcomes, down to the arrays of their members; members kept, and the sum of |advantage|."""
        kept, total = 0, 0.0
        while count > 0:
            for records in self._outbound.poll(timeout_ms=250, max_records=MAX_RECORDS).values():
                for record in records:
                    outcome = decode(OUTCOME, record.value)
                    for member in outcome["members"] if outcome["disposition"] == "kept" else ():
                        tokens = np.frombuffer(member["tokens"], "<i4")
                        mask = np.frombuffer(member["loss_mask"], np.uint8)
                        np.unpackbits(mask, count=len(tokens), bitorder="little").astype(np.bool_)
                        np.frombuffer(member["logprobs"], "<f4")
                        kept += 1
                        total += abs(member["advantage"])
                count -= len(records)
        return kept, total

    def close(self) -> None:
        """Let go."""
        self._producer.close()
        self._inbound.close(autocommit=False)
        self._outbound.close(autocommit=False)


def outcome_of(members: list[tuple[int, Datum]], closing_offset: int, time_ms: int) -> Datum:
    """The outcome of a complete group."""
    first = members[0][1]
    scores = advantages([datum["reward"] for _, datum in members])
    disposition = "zero-spread" if scores is None else "kept"
    kept = scores is not None
    return {
        **{name: first[name] for name in ("run", "policy", "partition", "group", "group_size", "task", "environment")},
        "source_run": first["run"],
        "source_policy": first["policy"],
        "item": first["item"],
        "closing_offset": closing_offset,
        "previous": -1,
        "closing_time_ms": time_ms,
        "lifetime_ms": first["lifetime_ms"],
        "closed_by": "complete",
        "disposition": disposition,
        "oldest_version": _oldest(members) if kept else -1,
        "members": [
            _member(datum, offset, disposition, score)
            for (offset, datum), score in zip(members, scores or [0.0] * len(members), strict=True)
        ],
    }


def _oldest(members: list[tuple[int, Datum]]) -> int:
    """Least version among all members' tokens."""
    return min(int(np.frombuffer(datum["versions"], "<i8")[1::3].min()) for _, datum in members)


def _member(datum: Datum, offset: int, disposition: str, advantage: float) -> Datum:
    kept = disposition == "kept"
    segments = np.frombuffer(datum["segments"], "<i4").reshape(-1, 2)
    return {
        **{name: datum[name] for name in ("index", "attempt", "status", "reward", "reward_parts", "step_rewards")},
        "offset": offset,
        "disposition": disposition,
        "advantage": advantage,
        "num_tokens": len(datum["tokens"]) // 4,
        "num_sampled": int(segments[segments[:, 0] == SAMPLED, 1].sum()),
        "temperature": datum["sampling"]["temperature"],
        "old_kv": datum["old_kv"],
        **{name: datum[name] if kept else b"" for name in ("versions", "segments", "tokens", "loss_mask", "logprobs")},
    }
