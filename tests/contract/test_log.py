"""What every log promises: the same tests against the log in memory and against a real broker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from infra.kafka_log import KafkaLog
from infra.log import Ack, Committed, Envelope, Log, Place, Reader, TopicSpec
from infra.memory_log import MemoryLog
from schemas.errors import (
    BrokerError,
    DeadlineExceeded,
    LogGap,
    LogTruncated,
    RecordTooLarge,
    SendFailed,
    SettingError,
)

LIMIT = 3 * 1024 * 1024


@pytest.fixture(scope="module", params=["memory", pytest.param("kafka", marks=pytest.mark.broker)])
def log(request: pytest.FixtureRequest) -> Iterator[MemoryLog | KafkaLog]:
    """A log of either kind; topics are made anew by each test."""
    made: MemoryLog | KafkaLog
    if request.param == "memory":
        made = MemoryLog(max_record_bytes=LIMIT)
    else:
        made = KafkaLog(request.getfixturevalue("bootstrap"), max_record_bytes=LIMIT, patience_s=20.0)
    as_promised: Log = made  # the type checker compares both with the protocol
    yield made
    as_promised.close()


@pytest.fixture
def topic(log: MemoryLog | KafkaLog) -> str:
    """A fresh topic of two partitions with append times."""
    return fresh(log, 2)


def fresh(log: MemoryLog | KafkaLog, partitions: int = 1, **config: str) -> str:
    name = f"contract-{uuid.uuid4().hex[:10]}"
    settings = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(LIMIT + 65536)}
    settings |= {key.replace("_", "."): value for key, value in config.items()}
    log.create([TopicSpec(name, partitions, settings)])
    return name


def trim(log: MemoryLog | KafkaLog, place: Place, offset: int) -> None:
    """Remove records below an offset, as retention does."""
    if isinstance(log, MemoryLog):
        log.delete_before(place, offset)
    else:
        from kafka import KafkaAdminClient, TopicPartition

        admin = KafkaAdminClient(bootstrap_servers=repr(log)[len("KafkaLog(") : -1])
        admin.delete_records({TopicPartition(*place): offset})
        admin.close()


def put(log: MemoryLog | KafkaLog, topic: str, values: list[bytes], partition: int = 0) -> list[Ack]:
    writer = log.writer()
    pending = [writer.send(topic, partition, value) for value in values]
    writer.flush(20.0)
    acks = [one.result(0.0) for one in pending]
    writer.close()
    return acks


def take(reader: Reader, count: int, limit_s: float = 15.0) -> list[Envelope]:
    """Records until there are `count`, or the time is over."""
    got: list[Envelope] = []
    end = time.monotonic() + limit_s
    while len(got) < count and time.monotonic() < end:
        got += reader.poll(1.0)
    return got


def test_records_come_back_whole_in_order_at_their_offsets(log: MemoryLog | KafkaLog, topic: str) -> None:
    acks = put(log, topic, [b"r%03d" % i for i in range(500)])
    assert acks == [Ack(0, i) for i in range(500)]
    reader = log.reader({Place(topic, 0): 0})
    got = take(reader, 500)
    reader.close()
    assert [r.offset for r in got] == list(range(500))
    assert [r.value for r in got] == [b"r%03d" % i for i in range(500)]
    assert {r.place for r in got} == {Place(topic, 0)}
    assert all(1_600_000_000_000 < r.time_ms < 4_000_000_000_000 for r in got)
    assert [r.time_ms for r in got] == sorted(r.time_ms for r in got)


def test_keys_headers_and_absent_parts_are_kept(log: MemoryLog | KafkaLog, topic: str) -> None:
    writer = log.writer()
    writer.send(topic, 0, b"", key=b"", headers=(("empty", b""), ("twice", b"1"), ("twice", b"2")))
    writer.send(topic, 0, b"\x00\xff", headers=())
    writer.send(topic, 0, None, key=b"\xfftombstone")
    writer.flush(20.0)
    writer.close()
    reader = log.reader({Place(topic, 0): 0})
    first, second, third = take(reader, 3)
    reader.close()
    assert (first.key, first.value) == (b"", b"")
    assert first.headers == (("empty", b""), ("twice", b"1"), ("twice", b"2"))
    assert (second.key, second.value, second.headers) == (None, b"\x00\xff", ())
    assert (third.key, third.value) == (b"\xfftombstone", None)


def test_positions_and_seeks_are_exact(log: MemoryLog | KafkaLog, topic: str) -> None:
    put(log, topic, [b"%d" % i for i in range(20)])
    place = Place(topic, 0)
    reader = log.reader({place: 7})
    assert reader.position(place) == 7
    got = reader.poll(10.0, max_records=5)
    assert [r.offset for r in got] == [7, 8, 9, 10, 11]
    assert reader.position(place) == 12
    reader.seek(place, 3)
    assert reader.position(place) == 3
    assert [r.offset for r in take(reader, 17)] == list(range(3, 20))
    reader.seek(place, 19)
    assert [r.offset for r in take(reader, 1)] == [19]
    with pytest.raises(SettingError, match=r"\[1\] is not read here"):
        reader.position(Place(topic, 1))
    with pytest.raises(SettingError, match="offset -1"):
        reader.seek(place, -1)
    reader.close()


def test_a_poll_of_an_idle_partition_is_empty_and_later_records_still_come(
    log: MemoryLog | KafkaLog, topic: str
) -> None:
    place = Place(topic, 0)
    reader = log.reader({place: 0})
    assert reader.poll(0.0) == []
    assert reader.poll(0.3) == []
    assert reader.position(place) == 0
    put(log, topic, [b"late"])
    assert [r.value for r in take(reader, 1)] == [b"late"]
    reader.close()


def test_a_reader_knows_the_end_from_what_it_polled(log: MemoryLog | KafkaLog, topic: str) -> None:
    put(log, topic, [b"%d" % i for i in range(6)])
    place = Place(topic, 0)
    reader = log.reader({place: 0})
    assert reader.end(place) >= reader.position(place) == 0
    assert len(reader.poll(10.0, max_records=2)) == 2
    assert (reader.position(place), reader.end(place)) == (2, 6)
    take(reader, 4)
    assert reader.end(place) == reader.position(place) == 6
    with pytest.raises(SettingError, match=r"\[1\] is not read here"):
        reader.end(Place(topic, 1))
    reader.close()


def test_a_kafka_reader_knows_where_its_partitions_are_before_it_polls(log: MemoryLog | KafkaLog, topic: str) -> None:
    if isinstance(log, MemoryLog):
        return
    reader = log.reader({Place(topic, 0): 0})  # else the client would wait before it may ask for the topic
    assert reader._feed._consumer._cluster.partitions_for_topic(topic) == {0, 1}  # type: ignore[union-attr]  # the client's
    reader.close()


def test_one_reader_reads_several_partitions_each_in_order(log: MemoryLog | KafkaLog) -> None:
    topic = fresh(log, 4)
    writer = log.writer()
    for i in range(400):
        writer.send(topic, i % 4, b"%d" % i)
    writer.flush(20.0)
    writer.close()
    reader = log.reader({Place(topic, partition): partition * 10 for partition in range(4)})
    got = take(reader, 400 - 60)
    reader.close()
    for partition in range(4):
        mine = [r for r in got if r.partition == partition]
        assert [r.offset for r in mine] == list(range(partition * 10, 100))
        assert [r.value for r in mine] == [b"%d" % (4 * r.offset + partition) for r in mine]


def test_bounds_follow_appends_and_retention(log: MemoryLog | KafkaLog, topic: str) -> None:
    assert log.bounds(topic) == {0: (0, 0), 1: (0, 0)}
    put(log, topic, [b"x"] * 10, partition=1)
    assert log.bounds(topic) == {0: (0, 0), 1: (0, 10)}
    trim(log, Place(topic, 1), 4)
    assert log.bounds(topic) == {0: (0, 0), 1: (4, 10)}


def test_a_missing_topic_or_partition_is_named(log: MemoryLog | KafkaLog, topic: str) -> None:
    for question in (
        lambda: log.bounds("contract-nowhere"),
        lambda: log.describe("contract-nowhere"),
        lambda: log.reader({Place("contract-nowhere", 0): 0}),
        lambda: log.offset_at(Place("contract-nowhere", 0), 0),
    ):
        with pytest.raises(BrokerError, match="contract-nowhere does not exist"):
            question()
    with pytest.raises(BrokerError, match=rf"{topic}\[2\] does not exist"):
        log.reader({Place(topic, 2): 0})
    writer = log.writer()
    with pytest.raises(SendFailed, match="contract-nowhere does not exist"):
        writer.send("contract-nowhere", 0, b"x").result(20.0)
    writer.close()


def test_offset_at_gives_the_first_record_at_or_after_a_time(log: MemoryLog | KafkaLog, topic: str) -> None:
    place, empty = Place(topic, 0), Place(topic, 1)
    for value in (b"0", b"1", b"2"):
        put(log, topic, [value])
        time.sleep(0.03)
    reader = log.reader({place: 0})
    times = [r.time_ms for r in take(reader, 3)]
    reader.close()
    assert times[0] < times[1] < times[2]
    assert log.offset_at(place, 0) == 0
    assert log.offset_at(place, times[1]) == 1
    assert log.offset_at(place, times[1] + 1) == 2
    assert log.offset_at(place, times[2]) == 2
    assert log.offset_at(place, times[2] + 1) is None
    assert log.offset_at(empty, 0) is None
    trim(log, place, 1)
    assert log.offset_at(place, 0) == 1
    with pytest.raises(SettingError, match="-1 ms"):
        log.offset_at(place, -1)


def test_committed_positions_keep_their_notes_and_move_no_reader(log: MemoryLog | KafkaLog, topic: str) -> None:
    put(log, topic, [b"%d" % i for i in range(5)])
    first, second = Place(topic, 0), Place(topic, 1)
    group = f"group-{topic}"
    assert log.committed(group, [first, second]) == {}
    reader = log.reader({first: 0})
    log.commit(group, {first: Committed(3, "digest=ab12")})
    assert log.committed(group, [first, second]) == {first: Committed(3, "digest=ab12")}
    assert len(take(reader, 5)) == 5
    reader.close()
    log.commit(group, {first: Committed(2), second: Committed(0, "ü" * 40)})
    assert log.committed(group, [second, first]) == {first: Committed(2, ""), second: Committed(0, "ü" * 40)}
    assert log.committed(f"other-{topic}", [first]) == {}
    log.commit(group, {first: Committed(4, "n" * 4000)})
    assert log.committed(group, [first])[first].note == "n" * 4000
    with pytest.raises(SettingError, match="4001 characters"):
        log.commit(group, {first: Committed(5, "n" * 4001)})
    assert log.committed(group, [first])[first].offset == 4


def test_a_gap_is_reported_exactly_and_reading_goes_on_behind_it(log: MemoryLog | KafkaLog, topic: str) -> None:
    place = Place(topic, 0)
    put(log, topic, [b"%d" % i for i in range(100)])
    trim(log, place, 50)
    reader = log.reader({place: 10})
    with pytest.raises(LogGap, match=r"offsets 10 to 49 \(40 records\)") as caught:
        take(reader, 1)
    assert (caught.value.topic, caught.value.partition, caught.value.start, caught.value.end) == (topic, 0, 10, 50)
    assert reader.position(place) == 50
    assert [r.offset for r in take(reader, 50)] == list(range(50, 100))
    reader.close()


def test_a_gap_in_one_partition_loses_nothing_of_another(log: MemoryLog | KafkaLog, topic: str) -> None:
    put(log, topic, [b"a%d" % i for i in range(30)], partition=0)
    put(log, topic, [b"b%d" % i for i in range(30)], partition=1)
    trim(log, Place(topic, 0), 20)
    reader = log.reader({Place(topic, 0): 0, Place(topic, 1): 0})
    got: list[Envelope] = []
    gaps = []
    end = time.monotonic() + 15
    while len(got) < 40 and time.monotonic() < end:
        try:
            got += reader.poll(1.0)
        except LogGap as gap:
            gaps.append((gap.partition, gap.start, gap.end))
    reader.close()
    assert gaps == [(0, 0, 20)]
    assert sorted(r.offset for r in got if r.partition == 0) == list(range(20, 30))
    assert [r.offset for r in got if r.partition == 1] == list(range(30))


def test_a_position_behind_the_end_means_a_truncated_log(log: MemoryLog | KafkaLog, topic: str) -> None:
    put(log, topic, [b"x"] * 3)
    reader = log.reader({Place(topic, 0): 9})
    with pytest.raises(LogTruncated, match="ends at 3, but offset 9"):
        take(reader, 1)
    reader.seek(Place(topic, 0), 2)
    assert [r.offset for r in take(reader, 1)] == [2]
    reader.close()


def test_a_record_at_the_limit_is_delivered_and_one_byte_more_is_refused_before_sending(
    log: MemoryLog | KafkaLog, topic: str
) -> None:
    writer = log.writer()
    with pytest.raises(RecordTooLarge, match=f"{LIMIT + 1} bytes .* limit is kafka.max_record_bytes = {LIMIT}"):
        writer.send(topic, 0, bytes(LIMIT + 1))
    with pytest.raises(RecordTooLarge, match="key and headers"):
        writer.send(topic, 0, b"x", key=bytes(40_000))
    largest = bytes(range(256)) * (LIMIT // 256)
    for value in (b"small", largest, b"after"):
        writer.send(topic, 0, value, key=b"k" * 1000)
    writer.send(topic, 1, b"beside")
    writer.flush(20.0)
    writer.close()
    reader = log.reader({Place(topic, 0): 0, Place(topic, 1): 0})
    got = take(reader, 4)
    reader.close()
    assert [r.value for r in got if r.partition == 0] == [b"small", largest, b"after"]
    assert [r.value for r in got if r.partition == 1] == [b"beside"]


def test_a_refused_record_fails_its_send_and_finishes_the_writer_only(log: MemoryLog | KafkaLog, topic: str) -> None:
    narrow = fresh(log, 1, max_message_bytes="50000")
    writer = log.writer()
    fine = writer.send(topic, 0, b"fine")
    assert fine.result(20.0) == Ack(0, 0)
    assert fine.done()
    refused = writer.send(narrow, 0, bytes(90_000))
    with pytest.raises(SendFailed, match=rf"{narrow}\[0\].*not acknowledged"):
        refused.result(20.0)
    assert refused.done()
    with pytest.raises(SendFailed, match=narrow):
        writer.flush(20.0)
    with pytest.raises(SendFailed, match="nothing can be sent any more"):
        writer.send(topic, 0, b"more")
    assert fine.result(0.0) == Ack(0, 0)
    writer.close()
    assert put(log, topic, [b"again"]) == [Ack(0, 1)]
    assert log.bounds(narrow) == {0: (0, 0)}


def test_topics_are_made_once_and_checked_afterwards(log: MemoryLog | KafkaLog) -> None:
    name = f"contract-{uuid.uuid4().hex[:10]}"
    config = {"cleanup.policy": "compact", "max.message.bytes": "200000", "message.timestamp.type": "LogAppendTime"}
    assert name not in log.topics()
    log.create([TopicSpec(name, 3, config), TopicSpec(f"{name}-b", 1)])
    assert {name, f"{name}-b"} <= log.topics()
    assert set(log.bounds(name)) == {0, 1, 2}
    described = log.describe(name)
    assert {key: described[key] for key in config} == config
    with pytest.raises(SendFailed, match="without"):
        put(log, name, [b"no key"])
    writer = log.writer()
    writer.send(name, 0, b"x", key=b"k").result(20.0)
    writer.close()
    log.create([TopicSpec(name, 3, config)])
    assert log.bounds(name)[0] == (0, 1)
    with pytest.raises(SettingError, match="exists with 3 partitions, but 4"):
        log.create([TopicSpec(name, 4, config)])
    with pytest.raises(SettingError, match=r"max.message.bytes = 200000, but 200001 is needed"):
        log.create([TopicSpec(name, 3, {**config, "max.message.bytes": "200001"})])
    with pytest.raises(SettingError, match="CreateTime is needed"):
        log.create([TopicSpec(name, 3, {**config, "message.timestamp.type": "CreateTime"})])


def test_a_topic_that_cannot_be_made_is_a_setting_error(log: MemoryLog | KafkaLog) -> None:
    with pytest.raises(SettingError, match="cannot be made"):
        log.create([TopicSpec(f"contract-{uuid.uuid4().hex[:10]}", 0)])


def test_closing_is_idempotent_and_final(log: MemoryLog | KafkaLog, topic: str) -> None:
    reader, writer = log.reader({Place(topic, 0): 0}), log.writer()
    for _ in range(2):
        reader.close()
        writer.close()
    with pytest.raises(BrokerError, match="closed"):
        reader.poll(0.0)
    with pytest.raises(SendFailed, match="closed"):
        writer.send(topic, 0, b"x")
    with pytest.raises(SendFailed, match="closed"):
        writer.flush(0.0)


def test_check_says_who_answers(log: MemoryLog | KafkaLog) -> None:
    said = log.check()
    assert "memory" in said or said.startswith("Kafka 4")


def test_memory_waits_and_failures_can_be_scripted() -> None:
    log = MemoryLog(buffer_bytes=100, patience_s=0.05)
    topic = fresh(log)
    writer = log.writer()
    log.stall()
    pending = writer.send(topic, 0, bytes(60))
    with pytest.raises(DeadlineExceeded, match=rf"{topic}\[0\]"):
        pending.result(0.01)
    with pytest.raises(DeadlineExceeded, match="1 records"):
        writer.flush(0.01)
    with pytest.raises(DeadlineExceeded, match="no room"):
        writer.send(topic, 0, bytes(60))
    log.resume()
    assert pending.result(0.0) == Ack(0, 0)
    log.fail_sends(1)
    with pytest.raises(SendFailed):
        writer.send(topic, 0, b"lost").result(0.0)
    log.fail_sends(1, present=True)
    with pytest.raises(SendFailed):
        log.writer().send(topic, 0, b"present").result(0.0)
    reader = log.reader({Place(topic, 0): 0})
    assert [r.value for r in reader.poll(0.0)] == [bytes(60), b"present"]
    log.away = True
    with pytest.raises(BrokerError, match="away"):
        reader.poll(0.0)
    with pytest.raises(BrokerError, match="away"):
        log.topics()


def test_memory_times_come_from_the_clock_given() -> None:
    now = iter([1000, 2000, 3000, 4000, 5000])
    log = MemoryLog(clock_ms=lambda: next(now))
    topic = fresh(log, 2)
    put(log, topic, [b"x"] * 5)
    asked = {6000: None, 5000: 4, 4500: 4, 0: 0, 1000: 0, 1001: 1}
    assert {time_ms: log.offset_at(Place(topic, 0), time_ms) for time_ms in asked} == asked
    assert log.offset_at(Place(topic, 1), 0) is None


def test_memory_compaction_leaves_holes_that_readers_step_over() -> None:
    log = MemoryLog()
    topic = fresh(log)
    writer = log.writer()
    for key in (b"a", b"b", b"a", b"a", b"b"):
        writer.send(topic, 0, b"v", key=key)
    log.compact(topic)
    reader = log.reader({Place(topic, 0): 0})
    assert [r.offset for r in reader.poll(0.0)] == [3, 4]
    assert reader.position(Place(topic, 0)) == 5
