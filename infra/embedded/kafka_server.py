"""The embedded broker: one Apache Kafka node (KRaft, broker and controller in one process), loopback only.

Its folder holds `data/` (the log, kept), `server.properties`, `log4j2.properties` and `broker.log`.
"""

from __future__ import annotations

import base64
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra import kafka_probe
from infra.embedded.java import Java, sharing_flags
from infra.embedded.ports import HOST
from schemas.errors import DependencyError

FORMAT_TIMEOUT_S = 120.0
MAIN_CLASS = "kafka.Kafka"


def properties(data: Path, port: int, controller_port: int) -> dict[str, str]:
    """The broker's whole configuration, by Kafka's own names."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",  # a typing mistake must not become a topic
        "group.initial.rebalance.delay.ms": "0",
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": "1",
        "offsets.retention.minutes": "525600",  # positions of a run that rests for a year are still there
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),  # 128 MiB by default, a quarter of the heap
        "num.network.threads": "2",
        "num.io.threads": "4",
        # After SIGKILL the next start waits until the controller lets go of the dead one.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
    }


def prepare(folder: Path, port: int, controller_port: int) -> Path:
    """Write the configuration files and return that of the broker."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = properties(folder / "data", port, controller_port).items()
    config = folder / "server.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in lines))
    (folder / "log4j2.properties").write_text(_LOG4J)
    return config


def is_formatted(folder: Path) -> bool:
    """Whether the data folder belongs to a broker already."""
    return (folder / "data" / "meta.properties").exists()


def cluster_id() -> str:
    """A new random id, as Kafka writes them; never one that begins with '-', which the tool would take for an option."""
    while (drawn := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return drawn


def format_storage(java: Java, jars: Sequence[Path], folder: Path) -> None:
    """Make a new data folder, once in its life. Raises DependencyError with what Kafka said."""
    command = [
        *_jvm(java, jars, folder),
        "-Xshare:auto",
        "-Xmx128m",
        "kafka.tools.StorageTool",
        *("format", "-t", cluster_id(), "-c", str(folder / "server.properties")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False, cwd=folder)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise DependencyError(f"Kafka could not format its data folder {folder / 'data'}: {said}")


def command(java: Java, jars: Sequence[Path], folder: Path, heap_mb: int, marks: Mapping[str, str]) -> list[str]:
    """The command line that runs the broker; `marks` become system properties, by which it is known again."""
    return [
        *_jvm(java, jars, folder),
        *sharing_flags(java, f"kafka-{_version(jars)}", folder),
        f"-Xmx{heap_mb}m",
        *(f"-D{name}={value}" for name, value in marks.items()),
        MAIN_CLASS,
        str(folder / "server.properties"),
    ]


def _version(jars: Sequence[Path]) -> str:
    """Release of the broker, from the name of its jar."""
    return next((jar.stem.rpartition("-")[2] for jar in jars if jar.name.startswith("kafka_2.13-")), "unknown")


def _jvm(java: Java, jars: Sequence[Path], folder: Path) -> list[str]:
    """Java with the flags that make it start fast and stay small."""
    return [
        str(java.path),
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:-UsePerfData",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}",
        f"-Dkafka.logs.dir={folder}",
        "-cp",
        ":".join(map(str, jars)),
    ]


def answers(port: int) -> bool:
    """Whether the broker on this port serves clients."""
    return kafka_probe.serves(HOST, port)


_LOG4J = """\
status = warn
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:kafka.logs.dir}/broker.log
appender.file.filePattern = ${sys:kafka.logs.dir}/broker.%i.log
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = [%d] %p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 16MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRefs = file
rootLogger.appenderRef.file.ref = file
"""
