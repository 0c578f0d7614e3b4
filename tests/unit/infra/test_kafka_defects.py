"""What the Kafka client gets wrong by itself, and the adapter does not: lost, stuck, silent, boundless.

The network is broken by a relay that every connection goes through; bit rot is made on the disk of a broker of its
own. Defects of kafka-python 3.0.12 that are met here:

D2   after its poll raised, the next poll never returns        D8   one refused record ends the producer for ever
D3   flush returns normally although records were lost         D9   send never blocks, memory has no bound
D5   commit waits without limit                                D12  every failed connection is the same timeout
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.embedded import servers
from infra.kafka_log import KafkaLog
from infra.log import CORRUPT_HEADER, Committed, Envelope, Place, TopicSpec
from infra.settings import EmbeddedTable
from schemas.errors import BrokerError, DeadlineExceeded, SendFailed
from support.relay import Relay

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    # The client leaves the socket of a refused connection to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
PATIENCE_S = 3.0


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


@pytest.fixture
def log(bootstrap: str, relay: Relay) -> Iterator[KafkaLog]:
    """A log with little patience whose every connection goes through the relay."""
    log = KafkaLog(
        bootstrap, client={"proxy_url": relay.socks_url}, patience_s=PATIENCE_S, buffer_bytes=1024 * 1024, client_id="t"
    )
    yield log
    log.close()


@pytest.fixture
def straight(bootstrap: str) -> Iterator[KafkaLog]:
    """A log without the relay, to look at what is really on the topic."""
    log = KafkaLog(bootstrap)
    yield log
    log.close()


@pytest.fixture
def topic(straight: KafkaLog) -> str:
    name = f"defects-{uuid.uuid4().hex[:10]}"
    straight.create([TopicSpec(name, 2, {"message.timestamp.type": "LogAppendTime"})])
    return name


def everything(log: KafkaLog, topic: str, partition: int = 0) -> list[Envelope]:
    """All records of a partition."""
    place = Place(topic, partition)
    reader = log.reader({place: 0})
    got: list[Envelope] = []
    while reader.position(place) < log.bounds(topic)[partition].end:
        got += reader.poll(1.0)
    reader.close()
    return got


def test_every_call_ends_while_the_broker_swallows_everything(log: KafkaLog, relay: Relay, topic: str) -> None:
    """D5: the client's own commit waits for ever, and its poll takes a dead broker for an idle topic."""
    place = Place(topic, 0)
    writer, reader = log.writer(), log.reader({place: 0})
    writer.send(topic, 0, b"before").result(10.0)
    assert [r.value for r in reader.poll(10.0)] == [b"before"]
    relay.mode = "hole"
    pending = writer.send(topic, 0, b"during")
    with pytest.raises(DeadlineExceeded, match=rf"{topic}\[0\]"):
        pending.result(0.2)
    with pytest.raises(DeadlineExceeded, match="1 records"):
        writer.flush(0.2)
    with pytest.raises(SendFailed, match="not acknowledged"):
        pending.result(10 * PATIENCE_S)
    for question in (
        lambda: log.commit("g", {place: Committed(1)}),
        lambda: log.committed("g", [place]),
        lambda: log.bounds(topic),
        lambda: log.writer(),
    ):
        with pytest.raises(BrokerError, match="Kafka at 127"):
            question()
    with pytest.raises(BrokerError, match=rf"has not answered for .* while {topic}\[0\] was read"):
        while True:
            assert reader.poll(1.0) == []
    assert reader.position(place) == 1
    writer.close()
    relay.mode = "pass"
    relay.cut()
    fresh = log.writer()
    fresh.send(topic, 0, b"after").result(10.0)
    got: list[Envelope] = []
    while not any(r.value == b"after" for r in got):
        got += reader.poll(1.0)
    assert [r.offset for r in got] == list(range(1, 1 + len(got)))
    log.commit("g", {place: Committed(1)})


def test_a_failed_record_is_never_silent(log: KafkaLog, straight: KafkaLog, relay: Relay, topic: str) -> None:
    """D3: the client's flush returns normally after records expired. Acknowledged must equal what is on the topic."""
    writer = log.writer()
    writer.send(topic, 0, b"first").result(10.0)
    relay.mode = "hole"
    pending = {b"%d" % i: writer.send(topic, 0, b"%d" % i) for i in range(10)}
    with pytest.raises(SendFailed, match="not acknowledged"):
        writer.flush(10 * PATIENCE_S)
    relay.mode = "pass"
    relay.cut()
    acked, failed = {b"first"}, []
    for value, one in pending.items():
        try:
            one.result(10.0)
            acked.add(value)
        except SendFailed:
            failed.append(value)
    assert failed
    with pytest.raises(SendFailed, match="nothing can be sent any more"):
        writer.send(topic, 0, b"more")
    writer.close()
    assert acked == {r.value for r in everything(straight, topic)}
    retry = log.writer()
    for value in failed:
        retry.send(topic, 0, value)
    retry.flush(20.0)
    assert sorted(r.value or b"" for r in everything(straight, topic)) == sorted([b"first", *pending])


def test_memory_of_unsent_records_is_bounded(log: KafkaLog, relay: Relay, topic: str) -> None:
    """D9: the client's send never blocks and keeps everything."""
    writer = log.writer()
    writer.send(topic, 0, b"first").result(10.0)
    relay.mode = "hole"
    sent = 0
    with pytest.raises((DeadlineExceeded, SendFailed)) as caught:
        for _ in range(100):
            writer.send(topic, 0, bytes(100_000))
            sent += 1
            assert writer.held_bytes <= 1024 * 1024
    assert 9 <= sent <= 10
    assert "no room" in str(caught.value) or "nothing can be sent" in str(caught.value)
    writer.close()


def test_what_was_sent_behind_a_failed_record_does_not_reach_the_log(
    log: KafkaLog, straight: KafkaLog, topic: str
) -> None:
    """D8: after one refused record the client fails all later ones, and may still deliver those under way."""
    narrow = f"{topic}-narrow"
    straight.create([TopicSpec(narrow, 1, {"max.message.bytes": "50000"})])
    writer = log.writer()
    with pytest.raises(SendFailed):
        writer.send(narrow, 0, bytes(90_000)).result(10.0)
    with pytest.raises(SendFailed):
        writer.send(topic, 0, b"behind")
    writer.close()
    assert straight.bounds(topic)[0] == (0, 0)
    with_another = log.writer()
    assert with_another.send(topic, 0, b"fresh").result(10.0).offset == 0


def send_in_rounds(
    log: KafkaLog, topic: str, todo: list[int], before_round: Callable[[int], None]
) -> tuple[list[tuple[int, int]], int]:
    """Send numbers, 40 a writer, again from the first that failed: (offset, number) acknowledged, and failed rounds."""
    acked: list[tuple[int, int]] = []
    rounds, failed_rounds = 0, 0
    while todo and rounds < 200:
        rounds += 1
        try:
            writer = log.writer()
        except BrokerError:
            failed_rounds += 1
            continue
        try:
            pending = [writer.send(topic, 0, b"%d" % number) for number in todo[:40]]
            before_round(rounds)
            for one in pending:
                acked.append((one.result(20.0).offset, todo[0]))
                todo.pop(0)
        except (SendFailed, DeadlineExceeded):
            failed_rounds += 1
        writer.close()
    return acked, failed_rounds


@pytest.mark.parametrize("seed", [1])
def test_acknowledged_records_survive_cuts_in_order(
    log: KafkaLog, straight: KafkaLog, relay: Relay, topic: str, seed: int
) -> None:
    """Cuts all the time and one black hole longer than the patience, with fresh writers after failures."""
    chance, stop = random.Random(seed), threading.Event()

    def cut_now_and_then() -> None:
        while not stop.wait(chance.uniform(0.05, 0.3)):
            relay.cut()

    def swallow(turn: int) -> None:
        if turn == 5:
            relay.mode = "hole"
            threading.Timer(1.5 * PATIENCE_S, lambda: setattr(relay, "mode", "pass")).start()

    trouble = threading.Thread(target=cut_now_and_then)
    trouble.start()
    todo = list(range(600))
    acked, failed_rounds = send_in_rounds(log, topic, todo, swallow)
    stop.set()
    trouble.join()
    assert todo == []
    assert failed_rounds > 0, "the hole was shorter than the patience: the test proves nothing"
    on_topic = {r.offset: r.value for r in everything(straight, topic)}
    assert {offset: on_topic.get(offset) for offset, _ in acked} == {offset: b"%d" % n for offset, n in acked}
    assert [n for _, n in sorted(acked)] == list(range(600))


def test_a_reader_loses_and_doubles_nothing_over_cuts(
    log: KafkaLog, straight: KafkaLog, relay: Relay, topic: str
) -> None:
    writer = straight.writer()
    for i in range(3000):
        writer.send(topic, i % 2, b"%d" % i)
    writer.flush(20.0)
    reader = log.reader({Place(topic, 0): 0, Place(topic, 1): 0})
    got: list[Envelope] = []
    polls = 0
    while len(got) < 3000 and polls < 500:
        got += reader.poll(1.0, max_records=100)
        polls += 1
        if polls % 4 == 0:
            relay.cut()
    for partition in (0, 1):
        assert [r.offset for r in got if r.partition == partition] == list(range(1500))


def test_nobody_at_the_address_is_said_at_once_with_the_address() -> None:
    """D12: the client tries for its whole time limit, and then names no cause."""
    log = KafkaLog("127.0.0.1:1, 127.0.0.1:2")
    for question in (log.topics, log.writer, log.check, lambda: log.reader({Place("t", 0): 0})):
        with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1: .*refused.*127\.0\.0\.1:2.*offsetrl up"):
            question()
    log.close()


def test_a_failed_login_names_no_password(bootstrap: str, caplog: pytest.LogCaptureFixture) -> None:
    """The broker speaks without login, so this one fails; nothing may repeat the password, at any level."""
    secret = "s3cr3t-KAFKA"
    client = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "bob"}
    with caplog.at_level(logging.DEBUG):
        log = KafkaLog(bootstrap, client=client, password=secret, patience_s=3.0)
        with pytest.raises(BrokerError, match="nobody gets in") as caught:
            log.topics()
        log.close()
    chain = repr(caught.value) + repr(caught.value.__cause__) + str(caught.value.__suppress_context__)
    assert secret not in chain + str(caught.value) + repr(log) + caplog.text
    assert "security.protocol" in str(caught.value)


def flip(state: Path, topic: str, mark: bytes, shift: int = 0) -> None:
    """Flip one bit in a topic's only segment, at a mark or some bytes before it."""
    (segment,) = (state / "kafka" / "data" / f"{topic}-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[data.index(mark) + shift] ^= 0x40
    segment.write_bytes(data)


def test_broken_batches_are_stepped_over_and_their_bytes_kept(tmp_path: Path) -> None:
    """D2: after a checksum error the client's poll never returns again."""
    table = EmbeddedTable(state=tmp_path / "state", heap_mb=256)
    try:
        log = KafkaLog(servers.up(table, "none", only=(servers.KAFKA,)).bootstrap_servers, patience_s=20.0)
        log.create([TopicSpec("rot", 1), TopicSpec("length", 1), TopicSpec("sound", 1)])
        for topic in ("rot", "length", "sound"):
            writer = log.writer()
            for batch in range(3):
                for number in range(5):
                    writer.send(topic, 0, b"batch%d-record%d" % (batch, number), key=b"k%d" % number)
                writer.flush(20.0)
            writer.close()
        log.close()
        servers.down(table.state)
        flip(table.state, "rot", b"batch1-record2")
        flip(table.state, "length", b"batch1-record2", shift=-8)
        log = KafkaLog(servers.up(table, "none", only=(servers.KAFKA,)).bootstrap_servers, patience_s=20.0)
        whole = {offset: b"batch%d-record%d" % divmod(offset, 5) for offset in range(15)}
        rot, length = everything(log, "rot"), everything(log, "length")
        reader = log.reader({Place("rot", 0): 0, Place("sound", 0): 0})
        mixed: list[Envelope] = []
        while len(mixed) < 30:
            mixed += reader.poll(5.0)
        log.close()
    finally:
        servers.down(table.state)
    for got in (rot, length):
        assert [r.offset for r in got] == list(range(15))
        assert {r.offset for r in got if r.value is None} == set(range(5, 10))
        assert {r.offset: r.value for r in got if r.value is not None} == {
            offset: value for offset, value in whole.items() if not 5 <= offset < 10
        }
        assert all([name for name, _ in r.headers] == [CORRUPT_HEADER] for r in got if r.value is None)
    found = {r.offset: dict(r.headers)[CORRUPT_HEADER] for r in rot if r.value is None}
    assert found.pop(7) == b"\x22atch1-record2"
    assert found == {offset: whole[offset] for offset in (5, 6, 8, 9)}
    assert [r.offset for r in mixed if r.topic == "rot"] == list(range(15))
    assert [r.value for r in mixed if r.topic == "sound"] == list(whole.values())
