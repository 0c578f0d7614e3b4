"""`offsetrl doctor`: looks at everything a run needs, each with what was found and what to do about it.

In an order in which the first failure explains the later ones: this machine, the broker (port, release, client,
topics, clock), the object store (port, clock, bucket). Nothing is changed but one heartbeat and one small object.
"""

from __future__ import annotations

import http.client
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from infra import kafka_probe, provision, wiring
from infra._doctor_basics import (
    CONNECT_TIMEOUT_S,
    Check,
    check_crc32c,
    check_disk,
    check_java,
    check_tcp,
    compare_clocks,
    host_port,
)
from infra.log import Log, Place
from infra.settings import Settings
from infra.store import ObjectStore
from infra.wiring import Endpoints
from infra.writers import learn
from schemas.codec import encode, num_schemas
from schemas.errors import OffsetRLError, SettingError
from schemas.names import control_topic, schemas_topic
from schemas.records import Heartbeat, State

_RELEASES_WITH_MARKER_LOSS = ("4.3", "4.4")


def examine(
    settings: Settings,
    endpoints: Endpoints | None = None,
    open_log: Callable[[], Log] | None = None,
    open_store: Callable[[], ObjectStore] | None = None,
) -> list[Check]:
    """Every check, in order. Failures are results, never exceptions; the factories are called late and once.

    What is not given is found as the daemons find it. A check that needs one that failed is left out, so that the
    list ends near the cause.
    """
    embedded_kafka = not settings.kafka.bootstrap_servers
    embedded_s3 = not (settings.s3.endpoint_url or settings.s3.aws)
    checks = list(check_machine(settings, embedded_kafka or embedded_s3))
    if endpoints is None:
        try:
            endpoints = wiring.endpoints(settings)
        except SettingError as error:
            return [*checks, Check("embedded servers", False, str(error), "run `offsetrl up`")]
    checks += check_broker(settings, endpoints, open_log or (lambda: wiring.open_log(settings, client_id="doctor")))
    checks += check_store(settings, endpoints, open_store or (lambda: wiring.open_store(settings)))
    return checks


def check_machine(settings: Settings, embedded: bool) -> Iterator[Check]:
    """Java (for embedded servers alone), the checksum extension, disk."""
    if embedded:
        yield check_java()
        yield check_disk("disk of the embedded servers", settings.embedded.state, "embedded.state")
    yield check_disk("disk of the run", settings.run.folder, "run.folder")
    yield check_crc32c()


def check_broker(settings: Settings, endpoints: Endpoints, open_log: Callable[[], Log]) -> Iterator[Check]:
    """The broker from its ports to its topics and its clock; ends at the first thing that the rest would stumble over."""
    ports = [
        check_tcp(f"broker port {address}", address, _broker_remedy(endpoints)) for address in _addresses(endpoints)
    ]
    yield from ports
    live = [address for address, check in zip(_addresses(endpoints), ports, strict=True) if check.ok]
    if not live:
        return
    yield check_release(live[0], settings)
    try:
        log = open_log()
    except (OffsetRLError, ValueError, OSError) as error:
        yield Check("broker client", False, str(error), _client_remedy(live[0]))
        return
    try:
        yield from _through_client(log, settings, live[0])
    finally:
        log.close()


def _through_client(log: Log, settings: Settings, address: str) -> Iterator[Check]:
    try:
        topics = log.topics()
    except OffsetRLError as error:
        yield Check("broker client", False, str(error), _client_remedy(address))
        return
    yield Check("broker client", True, f"{len(topics)} topics visible at {address}")
    try:
        yield from check_topics(log, settings)
        if schemas_topic(settings.run.name) in topics:
            yield check_schemas(log, settings)
        if control_topic(settings.run.name) in topics:
            yield check_broker_clock(log, settings.run.name, settings.kafka.patience_s)
    except OffsetRLError as error:
        remedy = "check that this user may read and describe the run's topics and write to its control topic"
        yield Check("topics", False, str(error), remedy)


def check_release(address: str, settings: Settings) -> Check:
    """Which release the broker is, and whether it is one known to break transactions."""
    name = "broker release"
    if _uses_tls(settings):
        return Check(name, True, "not asked: the connection is encrypted")
    host, port = host_port(address)
    try:
        release = kafka_probe.release(host, port, CONNECT_TIMEOUT_S)
    except (OSError, EOFError, ValueError) as error:
        remedy = "check that this port is the broker's listener for clients, and neither the controller's nor encrypted"
        return Check(name, False, f"{type(error).__name__}: {error}", remedy)
    note = " (loses transaction markers when killed; OffsetRL uses no transactions)"
    return Check(name, True, release + (note if release in _RELEASES_WITH_MARKER_LOSS else ""))


def check_topics(log: Log, settings: Settings) -> Iterator[Check]:
    """Whether the run's topics exist and are as they must be."""
    wanted = provision.topic_specs(settings)
    missing = [spec.name for spec in provision.missing(log, settings)]
    if len(missing) == len(wanted):
        yield Check("topics", True, "none yet: the first daemon makes them, or `offsetrl provision`")
    elif missing:
        got = f"{len(missing)} of {len(wanted)} missing: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        yield Check("topics", False, got, "run `offsetrl provision`")
    else:
        yield Check("topics", True, f"all {len(wanted)} there")
    different = provision.differences(log, settings)
    for text in different:
        topic, _, rest = text.partition(": ")
        got, _, remedy = rest.partition(": ")
        yield Check(f"topic {topic}", False, got, remedy)
    if not different and len(missing) < len(wanted):
        limit = settings.kafka.max_record_bytes
        yield Check("topic limits", True, f"broker's time, uncompressed, records up to {limit} bytes")


def check_schemas(log: Log, settings: Settings) -> Check:
    """Whether the schemas of all writers can be learnt."""
    name = "schemas of writers"
    try:
        writers = learn(log, settings)
    except SettingError as error:
        got, _, remedy = str(error).partition(": ")
        return Check(name, False, got, remedy)
    if not writers.refused:
        return Check(name, True, f"all {num_schemas()} can be read")
    first = next(f"{schema}: {why}" for schema, why in writers.refused.items())
    remedy = f"find who else writes to {schemas_topic(settings.run.name)}; records of such writers stay unread"
    return Check(name, False, f"{len(writers.refused)} refused, such as {first}", remedy)


def check_broker_clock(log: Log, run: str, patience_s: float) -> Check:
    """How far the broker's clock is from ours: append time of a heartbeat written now. It proves writing as well."""
    topic, session = control_topic(run), secrets.token_hex(4)
    beat = Heartbeat(run=run, policy="", role="doctor", name=socket.gethostname(), session=session, state=State.LEFT)
    writer = log.writer()
    try:
        before_s = time.time()
        ack = writer.send(topic, 0, encode(beat), key=b"doctor").result(patience_s)
        after_s = time.time()
    finally:
        writer.close()
    appended_s = _append_time_ms(log, topic, ack.offset, patience_s) / 1000
    return compare_clocks("clock of the broker", appended_s, before_s, after_s)


def _append_time_ms(log: Log, topic: str, offset: int, patience_s: float) -> int:
    """Append time of one record of partition 0."""
    reader = log.reader({Place(topic, 0): offset})
    deadline = time.monotonic() + patience_s
    try:
        while time.monotonic() < deadline:
            for envelope in reader.poll(0.5):
                if envelope.offset >= offset:  # compaction may have taken the very one already
                    return envelope.time_ms
    finally:
        reader.close()
    raise SettingError(f"{topic}: the heartbeat at offset {offset} was acknowledged, but cannot be read back")


def check_store(settings: Settings, endpoints: Endpoints, open_store: Callable[[], ObjectStore]) -> Iterator[Check]:
    """The object store from its port to its bucket."""
    if endpoints.s3_url:
        parts = urlsplit(endpoints.s3_url)
        address = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        tcp = check_tcp(f"object store port {address}", address, _store_remedy(endpoints))
        yield tcp
        if not tcp.ok:
            return
        yield check_store_clock(endpoints.s3_url)
    try:
        yield check_bucket(open_store(), settings.s3.bucket)
    except (OffsetRLError, ValueError, OSError) as error:
        yield Check("bucket", False, str(error), _bucket_remedy(settings.s3.bucket))


def check_store_clock(url: str) -> Check:
    """How far the store's clock is from ours, by the Date header of any answer; S3 refuses signatures 15 minutes off."""
    name, parts = "clock of the object store", urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        before_s = time.time()
        connection.request("GET", "/")
        said = connection.getresponse().getheader("Date")
        return compare_clocks(
            name, parsedate_to_datetime(said or "").timestamp(), before_s - 1, time.time()
        )  # whole seconds
    except (OSError, http.client.HTTPException) as error:
        return Check(name, False, f"{type(error).__name__}: {error}", f"check that {url} is a plain S3 endpoint")
    except ValueError:
        return Check(name, True, "not told by this store")
    finally:
        connection.close()


def check_bucket(store: ObjectStore, bucket: str) -> Check:
    """Write, read back, list and delete one small object of our own."""
    key, data = f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(1024)
    store.put(key, data)
    try:
        same = store.get(key, max_bytes=len(data)) == data
        listed = [info.key for info in store.list(key)] == [key]
    finally:
        store.delete([key])
    gone = store.size(key) is None
    failed = [name for name, well in (("read", same), ("list", listed), ("delete", gone)) if not well]
    if failed:
        got = f"written, but {', '.join(failed)} gave something else"
        return Check("bucket", False, got, "this store does not keep what it acknowledges: use another one")
    return Check("bucket", True, f"{bucket}: written, read, listed, deleted")


def _addresses(endpoints: Endpoints) -> list[str]:
    return [part.strip() for part in endpoints.bootstrap_servers.split(",") if part.strip()]


def _uses_tls(settings: Settings) -> bool:
    client = {key.replace(".", "_"): value for key, value in settings.kafka.client.items()}
    return "SSL" in client.get("security_protocol", "").upper().split("_")


def _broker_remedy(endpoints: Endpoints) -> str:
    if endpoints.embedded_kafka:
        return "run `offsetrl up`; `offsetrl status` shows where its log is"
    return "check kafka.bootstrap_servers, that the broker runs, and firewalls between"


def _store_remedy(endpoints: Endpoints) -> str:
    if endpoints.embedded_s3:
        return "run `offsetrl up`; `offsetrl status` shows where its log is"
    return "check s3.endpoint_url, that the store runs, and firewalls between"


def _client_remedy(address: str) -> str:
    return (
        f"{address} takes connections, but no client gets through: check kafka.client (security.protocol, sasl.mechanism), "
        "the password, and that the broker's advertised.listeners can be reached from here"
    )


def _bucket_remedy(bucket: str) -> str:
    return (
        f"check that bucket {bucket!r} exists, and that the keys (OFFSETRL_S3__ACCESS_KEY, OFFSETRL_S3__SECRET_KEY) may "
        "get, put, list and delete in it"
    )
