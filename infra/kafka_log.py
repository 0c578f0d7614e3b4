"""The log in Kafka; the only file that speaks the client.

`KafkaLog` opens clients when they are first needed and throws them away after any error. Every call ends within the
log's patience: where the client itself would wait without limit, it is run in a thread of its own and left behind.
What the client says about passwords never leaves this file: its debug output is shut off, its warnings are kept for
error texts (masked), and `KafkaLog` itself prints as its addresses alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, OffsetSpec
from kafka.structs import OffsetAndMetadata, TopicPartition

from infra._background import in_background
from infra._kafka_asker import Asker, Faults
from infra._kafka_clients import Client, ConsumerFeed, SoundProducer
from infra._kafka_diagnosis import Ear, Unreachable, reach, said
from infra._kafka_options import MIB, addresses, defaults, masked, translate
from infra._kafka_reader import KafkaReader
from infra._log_checks import check_existing, check_note, check_time
from infra._log_writer import LogWriter
from infra.log import Bounds, Committed, Place, TopicSpec
from schemas.errors import BrokerError, SettingError

_CLIENT = Client(errors=kafka_errors, partition=TopicPartition)
_FAULTS = Faults(
    all=(kafka_errors.KafkaError, OSError, RuntimeError), passing=(kafka_errors.RetriableError, OSError, RuntimeError)
)
_EAR = Ear()
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class KafkaLog:
    """A Kafka cluster as a log. Cheap to make: nothing is connected before it is needed."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        client: Mapping[str, str] = _NO_SETTINGS,
        password: str | None = None,
        replication_factor: int = 1,
        max_record_bytes: int = 16 * MIB,
        patience_s: float = 30.0,
        buffer_bytes: int = 64 * MIB,
        client_id: str = "offsetrl",
    ) -> None:
        """Settings as in the table [kafka]. Raises SettingError for what cannot be right; connects to nothing."""
        self._addresses = addresses(bootstrap_servers)
        self._where = ", ".join(f"{host}:{port}" for host, port in self._addresses)
        self._replication_factor, self._max_record_bytes = replication_factor, max_record_bytes
        self._patience_s, self._buffer_bytes = patience_s, buffer_bytes
        options = translate(client)
        self._secrets = [str(secret) for secret in (password, options.get("ssl_password")) if secret]
        self._options = {
            **defaults(patience_s=patience_s, max_record_bytes=max_record_bytes),
            "bootstrap_servers": [
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self._addresses
            ],
            "client_id": client_id,
            **options,
        }
        if password is not None:
            self._options["sasl_plain_password"] = password
        self._asker = Asker(
            lambda: self._make(KafkaAdminClient),
            _FAULTS,
            patience_s=patience_s,
            where=self._where,
            mask=self._mask,
        )
        self._num_partitions: dict[str, int] = {}
        self._opened: list[KafkaReader | LogWriter] = []  # strong: a client that nobody closes runs for ever
        self._opened_lock = threading.Lock()
        self._closed = False
        _EAR.secrets.update(self._secrets)
        _EAR.take_over("kafka")

    def __repr__(self) -> str:
        return f"KafkaLog({self._where})"

    # Readers and writers

    def reader(self, positions: Mapping[Place, int]) -> KafkaReader:
        """A reader of exactly these partitions, each from the given offset. Raises BrokerError."""
        for place in positions:
            self._check_place(*place)
        reader = KafkaReader(positions, self._feed, self._bounds_of, patience_s=self._patience_s, where=self._where)
        self._remember(reader)
        return reader

    def writer(self) -> LogWriter:
        """A fresh writer (acks from all replicas, idempotent). Raises BrokerError."""
        writer = LogWriter(
            SoundProducer(_CLIENT, self._make(KafkaProducer), self._check_place),
            max_record_bytes=self._max_record_bytes,
            buffer_bytes=self._buffer_bytes,
            patience_s=self._patience_s,
            mask=self._mask,
        )
        self._remember(writer)
        return writer

    # Questions about topics

    def bounds(self, topic: str) -> dict[int, Bounds]:
        """Start and end of each partition. Raises BrokerError naming a topic that does not exist."""

        def ask(admin: Any) -> dict[int, Bounds]:
            places = [TopicPartition(topic, partition) for partition in range(_num_partitions(admin, topic))]
            self._num_partitions[topic] = len(places)
            starts = admin.list_partition_offsets({place: OffsetSpec.EARLIEST for place in places})
            ends = admin.list_partition_offsets({place: OffsetSpec.LATEST for place in places})
            return {place.partition: Bounds(starts[place].offset, ends[place].offset) for place in places}

        return self._asker.ask(f"the bounds of {topic}", ask)

    def offset_at(self, place: Place, time_ms: int) -> int | None:
        """Offset of the first record appended at or after `time_ms`; None when there is none."""
        check_time(time_ms)
        self._check_place(*place)
        partition = TopicPartition(*place)

        def ask(admin: Any) -> int:
            return int(admin.list_partition_offsets({partition: time_ms})[partition].offset)

        offset = self._asker.ask(f"the offset of {place.topic}[{place.partition}] at {time_ms} ms", ask)
        return None if offset < 0 else offset

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        """Store positions under a name; readers never move by themselves."""
        for committed in positions.values():
            check_note(group, committed.note)
        wanted = {TopicPartition(*p): OffsetAndMetadata(c.offset, c.note, -1) for p, c in positions.items()}

        def ask(admin: Any) -> None:
            for partition, error in admin.alter_group_offsets(group, dict(wanted)).items():
                if error is not kafka_errors.NoError:
                    raise error(f"{partition.topic}[{partition.partition}]")

        if wanted:
            self._asker.ask(f"a commit of group {group}", ask)

    def committed(self, group: str, places: Iterable[Place]) -> dict[Place, Committed]:
        """Stored positions; partitions without one are left out."""
        wanted = [TopicPartition(*place) for place in places]

        def ask(admin: Any) -> dict[Place, Committed]:
            found = admin.list_group_offsets({group: wanted})[group]
            return {Place(*p): Committed(at.offset, at.metadata or "") for p, at in found.items() if at.offset >= 0}

        return self._asker.ask(f"the committed positions of group {group}", ask) if wanted else {}

    def topics(self) -> set[str]:
        """Names of all topics, without the broker's own."""
        names = self._asker.ask("the topics", lambda admin: admin.list_topics())
        return {name for name in names if not name.startswith("__")}

    def create(self, specs: Iterable[TopicSpec]) -> None:
        """Make the topics that do not exist yet; SettingError when one exists that does not do."""
        wanted = {spec.name: spec for spec in specs}
        missing = wanted.keys() - self.topics()
        if missing:
            self._asker.ask(
                "new topics", lambda admin: self._make_topics(admin, [wanted[name] for name in sorted(missing)])
            )
        for name in sorted(wanted):
            check_existing(wanted[name], len(self.bounds(name)), self.describe(name))

    def _make_topics(self, admin: Any, specs: list[TopicSpec]) -> None:
        """Make topics and wait until they have leaders; one that somebody else just made is checked by the caller."""
        request = {
            spec.name: {
                "num_partitions": spec.partitions,
                "replication_factor": self._replication_factor,
                "configs": dict(spec.config),
            }
            for spec in specs
        }
        answer = admin.create_topics(request, raise_errors=False)
        for topic in answer["topics"]:
            error = kafka_errors.for_code(topic["error_code"])
            if error in (kafka_errors.NoError, kafka_errors.TopicAlreadyExistsError):
                continue
            if issubclass(error, kafka_errors.RetriableError):
                raise error(topic["name"])
            raise SettingError(
                f"topic {topic['name']} cannot be made: {error.__name__}: {topic.get('error_message')} "
                f"(replication factor {self._replication_factor}, settings {request[topic['name']]['configs']})"
            )
        admin.wait_for_topics([spec.name for spec in specs], timeout_ms=int(500 * self._patience_s))

    def describe(self, topic: str) -> Mapping[str, str]:
        """The topic's effective configuration."""

        def ask(admin: Any) -> dict[str, str]:
            _num_partitions(admin, topic)
            found = admin.describe_configs([ConfigResource("TOPIC", topic)], config_filter="all")
            return {name: str(entry["value"]) for name, entry in found["topic"][topic].items()}

        return self._asker.ask(f"the configuration of {topic}", ask)

    def check(self) -> str:
        """What answers at the addresses: version, cluster id, number of brokers. Raises BrokerError."""

        def ask(admin: Any) -> str:
            cluster = admin.describe_cluster()
            brokers = cluster["brokers"]
            version = admin.get_broker_version_data(brokers[0]["broker_id"]).broker_version
            return f"Kafka {'.'.join(map(str, version))}, cluster {cluster['cluster_id']}, {len(brokers)} broker(s)"

        return self._asker.ask("the version", ask)

    def close(self) -> None:
        """Let go of everything that this log opened."""
        self._closed = True
        with self._opened_lock:
            opened, self._opened = self._opened, []
        for one in opened:
            one.close()
        self._asker.close()

    # Plumbing

    def _feed(self, positions: Mapping[Place, int], check_crcs: bool) -> ConsumerFeed:
        consumer = self._make(KafkaConsumer, {place[0] for place in positions}, check_crcs=check_crcs)
        return ConsumerFeed(_CLIENT, consumer, positions)

    def _bounds_of(self, place: Place) -> Bounds:
        return self.bounds(place.topic)[place.partition]

    def _check_place(self, topic: str, partition: int) -> None:
        """Raise BrokerError for a topic or a partition that does not exist; asked once for each topic."""
        if topic not in self._num_partitions:
            count = self._asker.ask(f"the partitions of {topic}", lambda admin: _num_partitions(admin, topic))
            self._num_partitions[topic] = count
        if not 0 <= partition < self._num_partitions[topic]:
            raise BrokerError(
                f"{topic}[{partition}] does not exist: {topic} has {self._num_partitions[topic]} partitions, from 0"
            )

    def _remember(self, opened: KafkaReader | LogWriter) -> None:
        """Keep a reader or writer for `close`, and forget those that were closed."""
        with self._opened_lock:
            self._opened = [one for one in self._opened if not one.closed]
            self._opened.append(opened)

    def _mask(self, text: str) -> str:
        return masked(text, self._secrets)

    def _make(self, kind: Any, topics: Collection[str] = (), **own: Any) -> Any:
        """A client of this kind; a broken start leaves nothing behind. Raises BrokerError saying what was heard."""
        if self._closed:
            raise BrokerError("this log is closed")
        if "proxy_url" not in self._options:
            reach(self._addresses)
        began_s = time.monotonic()
        made = []

        def net_client(**settings: Any) -> Any:
            made.append(kind.DEFAULT_CONFIG["kafka_client"](**settings))
            made[-1].cluster._topics.update(topics)  # else it asks for none at first, and may not ask again for 0.1 s
            return made[-1]

        wanted = {**self._options, **own, "kafka_client": net_client}
        try:
            return kind(**{name: value for name, value in wanted.items() if name in kind.DEFAULT_CONFIG})
        except (kafka_errors.KafkaError, OSError, RuntimeError, ValueError) as error:
            for client in made:
                in_background("close a Kafka client", client.close)
            raise Unreachable(
                self._mask(
                    f"Kafka at {self._where} takes connections, but nobody gets in ({said(error)}; "
                    f"{_EAR.since(began_s)}): it is starting or frozen, or security.protocol, certificates, user or "
                    "password do not match"
                )
            ) from None


def _num_partitions(admin: Any, topic: str) -> int:
    """Number of partitions. Raises BrokerError for a topic that does not exist."""
    for rest_s in (0.1, 0.3, 0.0):  # a topic that was just made is not known to every broker at once
        [found] = admin.describe_topics([topic])
        error = kafka_errors.for_code(found["error_code"])
        if error is not kafka_errors.UnknownTopicOrPartitionError:
            break
        time.sleep(rest_s)
    if error in (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.InvalidTopicError):
        raise BrokerError(f"topic {topic} does not exist: make the run's topics first (`offsetrl up`)")
    if error is not kafka_errors.NoError:
        raise error(topic)
    return len(found["partitions"])
