"""Bench `produce`: records of 4 KB, 64 KB and 1 MB to a real broker, every acknowledgement awaited.

Sides: our writer; a loop on the bare client with the same settings; the same loop with the client's own defaults (which
refuse a record of 1 MB). One call = one burst; figures are of the whole burst. Check `bare client`: CPU time of the bare
loop over ours, of the worst size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafka import KafkaProducer

from bench.broker import PATIENCE_S, Broker, broker
from bench.harness import Bench, Side, ratio
from infra.kafka_log import KafkaLog

KB = 1024
BURSTS = {"4 KB": (4 * KB, 1500), "64 KB": (64 * KB, 96), "1 MB": (1024 * KB, 8)}
"""Name -> (bytes of a record, records in a burst)."""
PARTITIONS = 4
TARGET = 0.85
LIBRARY_LIMIT_BYTES = 1024 * KB


def run(bench: Bench) -> None:
    """Measure on a broker of its own."""
    bench.round_s = 0.001  # one burst is a round
    with broker() as found:
        compare(bench, found, BURSTS)


def compare(bench: Bench, found: Broker, bursts: dict[str, tuple[int, int]]) -> None:
    """Send bursts on all sides in turns, and hold the ratio against the target."""
    log = found.log()
    ratios: dict[str, float] = {}
    cpu_s, size_kb = found.cpu_s(), 0
    try:
        for name, (size_bytes, count) in bursts.items():
            sides = make_sides(found, log, name.replace(" ", "-").lower(), size_bytes, count)
            times = bench.measure(f"{count:,} records of {name}", sides)
            ratios[name] = ratio(times["bare client"], times["ours"])
            bench.note(f"  CPU per record: {times['ours'].median_us() / count:.1f} us; bare / ours {ratios[name]:.2f}")
            size_kb += len(sides) * (bench.rounds + 1) * count * size_bytes // KB
    finally:
        log.close()
    bench.check("bare client", min(ratios.values()), TARGET)
    bench.hold_against("CPU of the broker", 1e6 * (found.cpu_s() - cpu_s) / size_kb, "us/KB")


def make_sides(found: Broker, log: KafkaLog, name: str, size_bytes: int, count: int) -> list[Side]:
    """Ours, the bare loop, and the bare loop with the library's defaults where it takes the record."""
    topics = {side: f"produce-{name}-{side}" for side in ("ours", "bare", "defaults")}
    found.create(dict.fromkeys(topics.values(), PARTITIONS))
    value = bytes(range(256)) * (size_bytes // 256)
    writer = log.writer()

    def ours() -> None:
        pending = [writer.send(topics["ours"], number % PARTITIONS, value) for number in range(count)]
        writer.flush(PATIENCE_S)
        for one in pending:
            one.result(0.0)

    sides = [
        Side("ours", ours, count * size_bytes),
        Side("bare client", _loop(found.bare(KafkaProducer), topics["bare"], value, count)),
    ]
    if size_bytes < LIBRARY_LIMIT_BYTES:
        plain = KafkaProducer(bootstrap_servers=[found.bootstrap])
        sides.append(Side("bare client, its defaults", _loop(plain, topics["defaults"], value, count)))
    return sides


def _loop(producer: Any, topic: str, value: bytes, count: int) -> Callable[[], None]:
    """A burst on the bare client; the futures are awaited, as its flush hides failures."""

    def burst() -> None:
        futures = [producer.send(topic, value, partition=number % PARTITIONS) for number in range(count)]
        for future in futures:
            future.get(PATIENCE_S)

    return burst
