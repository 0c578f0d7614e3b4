"""A broker for benches, topics on it, our log, and the bare client with the same settings as ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from infra._kafka_options import MIB, defaults
from infra.embedded import servers
from infra.kafka_log import KafkaLog
from infra.log import TopicSpec
from support.servers import session_bootstrap, session_state, stop_session_servers

PATIENCE_S = 30.0
MAX_RECORD_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Broker:
    """A real broker of this process's own."""

    bootstrap: str
    state: Path

    def log(self) -> KafkaLog:
        """Our log, with its own defaults."""
        return KafkaLog(self.bootstrap, patience_s=PATIENCE_S, max_record_bytes=MAX_RECORD_BYTES)

    def bare(self, kind: Any, **own: Any) -> Any:
        """A client (consumer or producer) with the settings that our log gives it, and nothing around it."""
        wanted = {
            **defaults(patience_s=PATIENCE_S, max_record_bytes=MAX_RECORD_BYTES),
            "bootstrap_servers": [self.bootstrap],
            **own,
        }
        return kind(**{name: value for name, value in wanted.items() if name in kind.DEFAULT_CONFIG})

    def create(self, topics: Mapping[str, int], **config: str) -> None:
        """Make topics, as many partitions as said."""
        sizes = {"max.message.bytes": str(MAX_RECORD_BYTES + 64 * 1024), "compression.type": "uncompressed"}
        log = self.log()
        log.create([TopicSpec(name, count, {**sizes, **config}) for name, count in topics.items()])
        log.close()

    def cpu_s(self) -> float:
        """Processor time of the broker so far."""
        [kafka] = [one for one in servers.status(self.state) if one.name == servers.KAFKA]
        times = psutil.Process(kafka.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def broker() -> Iterator[Broker]:
    """One in a temporary folder, stopped and cleared away at the end."""
    try:
        yield Broker(session_bootstrap(), session_state())
    finally:
        stop_session_servers()
