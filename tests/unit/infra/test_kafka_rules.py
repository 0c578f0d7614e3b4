"""Each defect of the Kafka client, the rule that answers it, the test that holds the rule, and what happens without it.

    D1   offsets of a failed transaction leak into the next    no transactions      here: what is refused
    D2   poll never returns after it raised                    fresh feed           test_kafka_defects: broken batches
    D3   flush returns though records were lost                each send looked at  test_kafka_defects: never silent
    D4   a lost member commits unchecked                       no client group      here: what is refused
    D5   commit waits without limit                            a thread, a limit    test_kafka_defects: every call ends
    D6   a commit that happened is said to have failed         no transactions      here: what is refused
    D7   a late commit reaches the next transaction            no transactions      here: what is refused
    D8   one refused record ends the producer for ever         a fresh writer       test_kafka_defects: behind a failed one
    D9   send never blocks, memory has no bound                a byte budget        test_kafka_defects: memory is bounded
    D10  a fenced static member reads on                       no client group      here: what is refused
    D11  flush raises while a batch is split                   sends, not flush     here: split batches
    D12  every failed connection is the same timeout           asked one by one     test_kafka_defects: nobody at the address
    D13  30 s between attempts to connect                      500 ms               here: what every client gets
    D14  reset to latest, commits by itself                    none, never          here: what every client gets

Without the rule of D1, D4, D6, D7 or D10 acknowledged records are lost or doubled in silence: what would bring one of
them in (a transactional id, a group, a static member) is no setting, and no such call stands in the product.
"""

from __future__ import annotations

import ast
import os
import uuid
from pathlib import Path

import pytest

from infra._kafka_options import defaults, translate
from infra.kafka_log import KafkaLog
from infra.log import Envelope, Place, TopicSpec
from schemas.errors import SettingError

ROOT = Path(__file__).resolve().parents[3]
NEVER = {
    "init_transactions", "begin_transaction", "commit_transaction", "abort_transaction", "send_offsets_to_transaction",
    "group_metadata", "subscribe", "commit_async",
}  # fmt: skip
"""Calls of the client through which D1, D4, D6, D7 and D10 come in."""


@pytest.mark.parametrize(
    "key", ["transactional.id", "group.id", "group.instance.id", "auto.offset.reset", "enable.auto.commit", "acks"]
)
def test_what_would_bring_a_defect_in_is_no_setting(key: str) -> None:
    """D1, D4, D6, D7, D10, D14."""
    with pytest.raises(SettingError, match=key.replace(".", r"\.")):
        translate({key: "1"})


def test_no_transaction_and_no_client_group_stands_in_the_product() -> None:
    """D1, D4, D6, D7, D10."""
    found = [
        f"{path.name}: {node.attr}"
        for path in (ROOT / "infra").rglob("*kafka*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in NEVER
    ]
    assert found == []


def test_what_every_client_gets_is_safe() -> None:
    """D13, D14: the client's own values are latest, commits by itself, and 30 s between attempts."""
    given = defaults(patience_s=30.0, max_record_bytes=2**20)
    wanted = {
        "auto_offset_reset": "none", "enable_auto_commit": False, "group_id": None, "acks": "all",
        "enable_idempotence": True, "allow_auto_create_topics": False,
    }  # fmt: skip
    assert {key: given[key] for key in wanted} == wanted
    assert given["reconnect_backoff_max_ms"] <= 1000


def _everything(log: KafkaLog, topic: str) -> list[Envelope]:
    place = Place(topic, 0)
    reader = log.reader({place: 0})
    got: list[Envelope] = []
    while reader.position(place) < log.bounds(topic)[0].end:
        got += reader.poll(1.0)
    reader.close()
    return got


@pytest.mark.broker
@pytest.mark.timeout(120)
def test_records_of_a_split_batch_are_all_acknowledged_where_they_stand(bootstrap: str) -> None:
    """D11: a batch above the topic's limit is split; the client's flush raises meanwhile, though all arrive."""
    log = KafkaLog(bootstrap, client={"linger.ms": "500", "batch.size": "400000"})
    topic = f"split-{uuid.uuid4().hex[:8]}"
    log.create([TopicSpec(topic, 1, {"max.message.bytes": "100000"})])
    values = [b"%02d" % n + os.urandom(20_000) for n in range(15)]
    writer = log.writer()
    pending = [writer.send(topic, 0, value) for value in values]
    writer.flush(30.0)
    acked = {one.result(1.0).offset: value for one, value in zip(pending, values, strict=True)}
    assert {envelope.offset: envelope.value for envelope in _everything(log, topic)} == acked
    assert len(acked) == 15
    log.close()
