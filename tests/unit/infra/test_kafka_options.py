"""Client settings: Java's names are understood, unsafe and unknown ones refused, passwords repeated nowhere."""

from __future__ import annotations

import doctest

import pytest

from infra import _background, _kafka_diagnosis, _kafka_options, _log_checks
from infra._kafka_options import addresses, translate
from infra.kafka_log import KafkaLog
from schemas.errors import SettingError


def test_java_names_and_own_names_give_the_same() -> None:
    java = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "bob",
        "ssl.truststore.location": "ca.pem",
        "ssl.endpoint.identification.algorithm": "",
        "linger.ms": "20",
    }
    own = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "bob",
        "ssl_cafile": "ca.pem",
        "ssl_check_hostname": "false",
        "linger_ms": "20",
    }
    wanted = {**own, "ssl_check_hostname": False, "linger_ms": 20}
    assert translate(java) == translate(own) == wanted


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("security.protokol", "SSL", "nearest known one is security_protocol"),
        ("auto.offset.reset", "latest", "auto.offset.reset is decided by OffsetRL"),
        ("enable.auto.commit", "true", "decided by OffsetRL"),
        ("acks", "1", "decided by OffsetRL"),
        ("linger.ms", "soon", "must be a whole number"),
        ("ssl.truststore.location", "ca.jks", "must be PEM"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(key: str, text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        translate({key: text})


@pytest.mark.parametrize("key", ["sasl.password", "sasl_plain_password", "sasl.jaas.config"])
def test_a_password_in_the_settings_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(SettingError, match="OFFSETRL_KAFKA__SASL_PASSWORD") as caught:
        KafkaLog("127.0.0.1:9092", client={key: "s3cr3t-KAFKA"})
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("servers", ["", " , ", "host", "host:", "host:0", "host:99999", "kafka://bob:s3cr3t@h:1"])
def test_addresses_need_a_host_and_a_port(servers: str) -> None:
    with pytest.raises(SettingError, match="host:port") as caught:
        addresses(servers)
    assert "s3cr3t" not in str(caught.value)


def test_the_examples_in_the_docstrings_are_right() -> None:
    for module in (_background, _kafka_diagnosis, _kafka_options, _log_checks):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0
