"""Client settings of a user's, in Java's dotted names or the client's own, turned into what the client takes.

Knows names and types only, and no client: an unknown name fails with the nearest known one, a setting that decides
about safety (offset reset, acknowledgements, commits) is refused, and a password never stands in an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from schemas.errors import SettingError

KNOWN: Mapping[str, type] = {
    "security_protocol": str,
    "ssl_check_hostname": bool,
    "ssl_cafile": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_crlfile": str,
    "sasl_mechanism": str,
    "sasl_plain_username": str,
    "sasl_kerberos_name": str,
    "sasl_kerberos_service_name": str,
    "sasl_kerberos_domain_name": str,
    "proxy_url": str,
    "client_dns_lookup": str,
    "client_rack": str,
    "connections_max_idle_ms": int,
    "metadata_max_age_ms": int,
    "reconnect_backoff_ms": int,
    "receive_buffer_bytes": int,
    "send_buffer_bytes": int,
    "fetch_max_wait_ms": int,
    "max_partition_fetch_bytes": int,
    "linger_ms": int,
    "batch_size": int,
}
"""Settings that may be given, with their types."""

JAVA_NAMES: Mapping[str, str] = {
    "sasl.username": "sasl_plain_username",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "ssl.truststore.location": "ssl_cafile",
    "ssl.ca.location": "ssl_cafile",
    "ssl.keystore.location": "ssl_certfile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
    "max.partition.fetch.bytes": "max_partition_fetch_bytes",
}
"""Dotted names that are more than the client's name with dots; every other name is matched by its dots."""

MIB = 1024 * 1024
_OVERHEAD_BYTES = 64 * 1024  # beside the largest value: key, headers, the batch around them
_HOSTNAME_CHECK = "ssl.endpoint.identification.algorithm"
_OWNED = frozenset(
    {
        "acks",
        "auto_commit_interval_ms",
        "auto_offset_reset",
        "bootstrap_servers",
        "check_crcs",
        "client_id",
        "compression_type",
        "delivery_timeout_ms",
        "enable_auto_commit",
        "enable_idempotence",
        "fetch_max_bytes",
        "group_id",
        "group_instance_id",
        "isolation_level",
        "key_deserializer",
        "key_serializer",
        "max_block_ms",
        "max_request_size",
        "partitioner",
        "reconnect_backoff_max_ms",
        "request_timeout_ms",
        "retries",
        "transactional_id",
        "value_deserializer",
        "value_serializer",
    }
)
_PASSWORDS = ("sasl_plain_password", "sasl_password", "sasl_jaas_config")


def translate(client: Mapping[str, str]) -> dict[str, str | int | bool]:
    """Settings in the client's names and types. Raises SettingError naming the key, never a secret's value.

    >>> translate({"security.protocol": "SASL_SSL", "linger.ms": "20"})
    {'security_protocol': 'SASL_SSL', 'linger_ms': 20}
    """
    options: dict[str, str | int | bool] = {}
    for given, text in client.items():
        if given == _HOSTNAME_CHECK:
            options["ssl_check_hostname"] = bool(text.strip())
            continue
        name = JAVA_NAMES.get(given, given.replace(".", "_"))
        if name not in KNOWN:
            raise SettingError(_refusal(given, name))
        options[name] = _value(given, KNOWN[name], text)
        if name.endswith("file") and text.lower().endswith((".jks", ".p12", ".pfx")):
            raise SettingError(f"kafka.client: {given} is {text!r}, but certificates and keys must be PEM files")
    return options


def _refusal(given: str, name: str) -> str:
    """Why a setting is not taken."""
    if name in _PASSWORDS:
        return (
            f"kafka.client: {given} holds a password, and these settings are shown by --check: give it in the "
            "environment as OFFSETRL_KAFKA__SASL_PASSWORD, or in a file named by kafka.sasl_password_file"
        )
    if name in _OWNED:
        return (
            f"kafka.client: {given} is decided by OffsetRL itself, because records would be lost or doubled otherwise"
        )
    near = difflib.get_close_matches(name, [*KNOWN, *JAVA_NAMES], n=1, cutoff=0.0)[0]
    return f"kafka.client: unknown setting {given}; the nearest known one is {near} (known: {', '.join(sorted(KNOWN))})"


def _value(given: str, wanted: type, text: str) -> str | int | bool:
    """A setting's text as its type; settings come from TOML tables of strings and from the environment."""
    if wanted is str:
        return text
    if wanted is bool and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if wanted is int and text.strip().isdecimal():
        return int(text)
    allowed = "true or false" if wanted is bool else "a whole number, 0 or more"
    raise SettingError(f"kafka.client: {given} is {text!r}, but must be {allowed}")


def defaults(*, patience_s: float, max_record_bytes: int) -> dict[str, Any]:
    """What all clients of a log get before the user's settings; a client takes the names that it knows."""
    patience_ms = int(1000 * patience_s)
    request_ms = min(10_000, patience_ms // 3)
    return {
        "bootstrap_timeout_ms": request_ms,
        "request_timeout_ms": request_ms,
        "reconnect_backoff_max_ms": 500,  # the client's own 30 s would outlast a restart of the broker by far
        "retry_backoff_ms": 50,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
        "receive_message_max_bytes": max(100_000_000, max_record_bytes + 32 * MIB),
        # consumers
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",
        "isolation_level": "read_uncommitted",
        "fetch_max_wait_ms": min(500, request_ms // 2),
        "max_partition_fetch_bytes": MIB,  # a larger record still comes: brokers send one batch, whatever its size
        "fetch_max_bytes": 16 * MIB,
        # producers
        "acks": "all",
        "enable_idempotence": True,
        "linger_ms": 5,
        "batch_size": min(256 * 1024, max_record_bytes),
        "max_request_size": max_record_bytes + _OVERHEAD_BYTES,
        "max_block_ms": patience_ms,
        "delivery_timeout_ms": patience_ms,
    }


def addresses(bootstrap_servers: str) -> list[tuple[str, int]]:
    """Hosts and ports of a comma-separated list. Raises SettingError for a part without a port.

    >>> addresses("a:9092, [::1]:9093")
    [('a', 9092), ('::1', 9093)]
    """
    found: list[tuple[str, int]] = []
    for part in (part.strip() for part in bootstrap_servers.split(",") if part.strip()):
        host, colon, port = part.rpartition(":")
        if not colon or not port.isdecimal() or not 0 < int(port) < 65536 or not host or "@" in host or "/" in host:
            # The part is not repeated: an address with a password in it, of the form user:password@host, ends up here.
            raise SettingError(
                f"kafka.bootstrap_servers: part {len(found) + 1} is not of the form host:port; give host:port, "
                "comma separated, without a scheme or a user"
            )
        found.append((host.strip("[]"), int(port)))
    if not found:
        raise SettingError("kafka.bootstrap_servers is empty: give host:port, comma separated, or run `offsetrl up`")
    return found


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets.

    >>> masked("login as bob with hunter2 failed", ["hunter2"])
    'login as bob with *** failed'
    """
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return text
