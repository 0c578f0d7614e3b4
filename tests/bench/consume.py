"""Bench `consume`: records of 4 KB, 64 KB and 1 MB from a real broker.

Sides: our reader; a loop on the bare client with the same settings; the same with the client's own. One call = the next
stretch of one long topic; figures are of the stretch. Check `bare client`: CPU time of the bare loop over ours, of the
worst size.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from bench.broker import PATIENCE_S, Broker, broker
from bench.harness import Bench, Side, ratio
from infra.kafka_log import KafkaLog
from infra.log import Place

KB = 1024
STRETCHES = {"4 KB": (4 * KB, 2000), "64 KB": (64 * KB, 96), "1 MB": (1024 * KB, 8)}
"""Name -> (bytes of a record, records in a stretch)."""
PARTITIONS = 4
MAX_RECORDS = 1000
TARGET = 0.85


def run(bench: Bench) -> None:
    """Measure on a broker of its own."""
    bench.round_s = 0.001  # one stretch is a round
    with broker() as found:
        compare(bench, found, STRETCHES)
    bench.hold_against("loopback socket, 64 KB at a time", loopback_mb_per_s(256), "MB/s")


def compare(bench: Bench, found: Broker, stretches: dict[str, tuple[int, int]]) -> None:
    """Read on all sides in turns, and hold the ratio against the target."""
    log = found.log()
    ratios: dict[str, float] = {}
    try:
        for name, (size_bytes, count) in stretches.items():
            topic = f"consume-{name.replace(' ', '-').lower()}"
            fill(found, log, topic, size_bytes, count * (bench.rounds + 2))
            with contextlib.ExitStack() as clients:
                times = bench.measure(f"{count:,} records of {name}", make_sides(found, log, topic, count, clients))
            ratios[name] = ratio(times["bare client"], times["ours"])
            speed = count * size_bytes / times["ours"].median_us("wall")
            bench.note(
                f"  CPU per record: {times['ours'].median_us() / count:.1f} us; {speed:,.0f} MB/s; "
                f"bare / ours {ratios[name]:.2f}"
            )
    finally:
        log.close()
    bench.check("bare client", min(ratios.values()), TARGET)


def fill(found: Broker, log: KafkaLog, topic: str, size_bytes: int, count: int) -> None:
    """A topic with this many records, evenly over its partitions."""
    found.create({topic: PARTITIONS})
    value = bytes(range(256)) * (size_bytes // 256)
    writer = log.writer()
    for number in range(count):
        writer.send(topic, number % PARTITIONS, value)
    writer.flush(PATIENCE_S)
    writer.close()


def make_sides(found: Broker, log: KafkaLog, topic: str, count: int, clients: contextlib.ExitStack) -> list[Side]:
    """Ours, and two loops on the bare client; `clients` closes them."""
    reader = clients.enter_context(contextlib.closing(log.reader({Place(topic, n): 0 for n in range(PARTITIONS)})))

    def ours() -> tuple[int, int]:
        values = [envelope.value or b"" for envelope in reader.poll(1.0, MAX_RECORDS)]
        return len(values), sum(map(len, values))

    plain = KafkaConsumer(bootstrap_servers=[found.bootstrap], auto_offset_reset="earliest", enable_auto_commit=False)
    bare = found.bare(KafkaConsumer)
    clients.callback(plain.close)
    clients.callback(bare.close)
    return [
        Side("ours", Stretch(ours, count)),
        Side("bare client", Stretch(_loop(bare, topic), count)),
        Side("bare client, its defaults", Stretch(_loop(plain, topic), count)),
    ]


class Stretch:
    """Polls until `count` more records are read; what a poll gave too much counts for the next stretch.

    >>> polls = iter([(3, 30), (3, 30), (3, 30)])
    >>> stretch = Stretch(lambda: next(polls), 4)
    >>> stretch(), stretch()
    (6, 9)
    """

    def __init__(self, poll: Callable[[], tuple[int, int]], count: int) -> None:
        self._poll, self._count = poll, count
        self._wanted = self._read = 0

    def __call__(self) -> int:
        """Read on; how many records have been read in all."""
        self._wanted += self._count
        deadline_s = time.monotonic() + PATIENCE_S
        while self._read < self._wanted:
            assert time.monotonic() < deadline_s, f"{self._read} of {self._wanted} records came"
            self._read += self._poll()[0]
        return self._read


def _loop(consumer: Any, topic: str) -> Callable[[], tuple[int, int]]:
    """A poll of the bare client: number of records and their bytes."""
    partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 0)

    def poll() -> tuple[int, int]:
        found = consumer.poll(timeout_ms=1000, max_records=MAX_RECORDS)
        values = [record.value for records in found.values() for record in records]
        return len(values), sum(map(len, values))

    return poll


def loopback_mb_per_s(size_mb: int) -> float:
    """What a plain socket on this machine carries between two threads."""
    chunk = bytes(64 * KB)
    left, right = socket.socketpair()

    def send() -> None:
        for _ in range(size_mb * 16):
            left.sendall(chunk)
        left.close()

    sender = threading.Thread(target=send)
    start_s = time.perf_counter()
    sender.start()
    buffer = bytearray(len(chunk))
    while right.recv_into(buffer):
        pass
    spent_s = time.perf_counter() - start_s
    sender.join()
    right.close()
    return size_mb / spent_s
