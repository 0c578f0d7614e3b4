"""Settings in, live log and object store out: the only place that chooses between servers of the user's and the embedded ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.config import read_secret
from infra.log import Log
from infra.secrecy import redact
from infra.settings import S3Table, Settings
from infra.store import ObjectStore
from schemas.errors import SettingError
from schemas.names import nearest


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the run's broker and home store are. `s3_url` is empty for AWS itself; keys are None for the usual chain."""

    bootstrap_servers: str
    s3_url: str
    access_key: str | None
    secret_key: str | None = field(repr=False)
    embedded_kafka: bool = False
    embedded_s3: bool = False


def endpoints(settings: Settings, *, start: bool = False) -> Endpoints:
    """Addresses of what the settings name, and of the embedded servers for what they leave out.

    With `start`, embedded servers that do not run are started. Raises SettingError when they never were.
    """
    needed = embedded(settings)
    bootstrap, s3_url = settings.kafka.bootstrap_servers, settings.s3.endpoint_url
    access_key, secret_key = _keys(settings.s3)
    if needed:
        from infra.embedded import servers

        table = settings.embedded
        found = servers.up(table, settings.s3.bucket, needed) if start else servers.endpoints(table.state, needed)
        bootstrap = bootstrap or found.bootstrap_servers
        if "s3" in needed:
            s3_url, access_key, secret_key = found.s3_url, found.access_key, found.secret_key
            redact.add([found.secret_key])
    return Endpoints(bootstrap, s3_url, access_key, secret_key, "kafka" in needed, "s3" in needed)


def embedded(settings: Settings) -> list[str]:
    """Which of `kafka` and `s3` are the embedded servers."""
    own = {"kafka": bool(settings.kafka.bootstrap_servers), "s3": _is_own(settings.s3)}
    return [name for name, given in own.items() if not given]


def open_log(settings: Settings, client_id: str) -> Log:
    """A connection to the run's broker; `client_id` shows up in the broker's logs and quotas."""
    from infra.kafka_log import KafkaLog

    kafka = settings.kafka
    password = kafka.sasl_password.get_secret_value() if kafka.sasl_password else None
    if password is None and kafka.sasl_password_file is not None:
        password = read_secret(kafka.sasl_password_file)
    return KafkaLog(
        endpoints_of_kafka(settings),
        client=dict(kafka.client),
        password=password,
        replication_factor=kafka.replication_factor,
        max_record_bytes=kafka.max_record_bytes,
        patience_s=kafka.patience_s,
        buffer_bytes=kafka.buffer_bytes,
        client_id=client_id,
    )


def open_store(settings: Settings, region: str = "") -> ObjectStore:
    """The bucket of a region; "" is the home of the trainers. Buckets of the embedded store are made on demand."""
    from infra.s3_store import S3Store

    table = region_table(settings, region)
    url, (access_key, secret_key) = table.endpoint_url, _keys(table)
    if not _is_own(table):
        from infra.embedded import servers

        found = servers.endpoints(settings.embedded.state, ["s3"])
        url, access_key, secret_key = found.s3_url, found.access_key, found.secret_key
        redact.add([found.secret_key])
        # a bucket of the embedded store is a folder of its data
        (settings.embedded.state / "s3" / "data" / table.bucket).mkdir(parents=True, exist_ok=True)
    return S3Store(
        endpoint_url=url,
        bucket=table.bucket,
        prefix=table.prefix,
        region_name=table.region_name,
        access_key=access_key,
        secret_key=secret_key,
        timeout_s=table.timeout_s,
    )


def endpoints_of_kafka(settings: Settings) -> str:
    """host:port of the brokers, without asking for a store."""
    if settings.kafka.bootstrap_servers:
        return settings.kafka.bootstrap_servers
    from infra.embedded import servers

    return servers.endpoints(settings.embedded.state, ["kafka"]).bootstrap_servers


def store_url(settings: Settings, region: str = "") -> str:
    """URL of a region's store; "" for AWS itself."""
    table = region_table(settings, region)
    if _is_own(table):
        return table.endpoint_url
    from infra.embedded import servers

    return servers.endpoints(settings.embedded.state, ["s3"]).s3_url


def region_table(settings: Settings, region: str) -> S3Table:
    """The store settings of a region. Raises SettingError for one that is not in the settings."""
    if region and region not in settings.regions:
        known = nearest(region, settings.regions) if settings.regions else f"there is none: add [regions.{region}]"
        raise SettingError(f"there is no region {region!r} in the settings; {known}")
    return settings.bucket(region)


def _is_own(table: S3Table) -> bool:
    return bool(table.endpoint_url) or table.aws


def _keys(table: S3Table) -> tuple[str | None, str | None]:
    return (
        table.access_key.get_secret_value() if table.access_key else None,
        table.secret_key.get_secret_value() if table.secret_key else None,
    )
