from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import preflight, wiring
from infra.settings import EmbeddedTable, KafkaTable, PolicyTable, RunTable, S3Table, SamplingTable, Settings, TaskTable
from schemas.errors import BrokerError, SettingError, StoreError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound and never listens: connections to it are refused."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def settings(tmp_path: Path, kafka_port: int = 1, s3_port: int = 1, **tables: Any) -> Settings:
    given: dict[str, Any] = {
        "run": RunTable(folder=tmp_path / "runs"),
        "kafka": KafkaTable(bootstrap_servers=f"127.0.0.1:{kafka_port}"),
        "s3": S3Table(endpoint_url=f"http://127.0.0.1:{s3_port}", bucket="weights"),
        "policies": {"main": PolicyTable(model=tmp_path / "model")},
    }
    return Settings(**{**given, **tables})


def test_a_whole_model_passes(model: Path) -> None:
    preflight.check_model(model, "policies.main.model")


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
        ("", "there is no model folder"),
    ],
)
def test_a_model_that_lacks_something_is_refused(model: Path, remove: str, said: str) -> None:
    if remove:
        (model / remove).unlink()
    else:
        shutil.rmtree(model)
    with pytest.raises(SettingError, match=said) as caught:
        preflight.check_model(model, "policies.main.model")
    assert "policies.main.model" in str(caught.value) and str(model) in str(caught.value)


def test_weights_that_can_run_code_are_refused_by_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(SettingError, match=r"pytorch_model\.bin.*can run code"):
        preflight.check_model(model, "policies.main.model")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_config_that_is_none_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(SettingError, match=r"config\.json"):
        preflight.check_model(model, "policies.main.model")


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"max_tokens": 256}])
def test_sampling_that_cannot_be_trained_on_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    table = PolicyTable(model=tmp_path, sampling=SamplingTable(**field))
    with pytest.raises(SettingError, match=rf"policies\.main\.sampling\.{next(iter(field))}"):
        preflight.check_sampling(table, "main")


def test_only_the_roles_that_need_it_look_at_model_and_task(tmp_path: Path, model: Path) -> None:
    shutil.rmtree(model)
    bad_task = TaskTable(environment="sort-digit")
    given = settings(tmp_path, policies={"main": PolicyTable(model=model, task=bad_task)})
    preflight.check_settings(given, "main", "process")
    with pytest.raises(SettingError, match="there is no model folder"):
        preflight.check_settings(given, "main", "train")
    with pytest.raises(SettingError, match=r"policies\.main\.task: .*did you mean 'sort-digits'"):
        preflight.check_settings(given, "main", "dispatch")
    with pytest.raises(SettingError):
        preflight.check_run(given)


def test_a_broken_line_of_a_prompt_file_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1="}) + "\n{broken\n")
    task = TaskTable(environment="prompts", settings={"file": str(prompts), "reward": "operator:eq"})
    with pytest.raises(SettingError, match=r"policies\.main\.task: .*\b2\b"):
        preflight.check_task(PolicyTable(model=tmp_path, task=task), 0, "main")


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="'vllm', which is not installed"):
        preflight.check_engine(PolicyTable(model=tmp_path), "main")


def test_a_full_disk_is_met_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 2**20))
    with pytest.raises(SettingError, match="1 MiB free and needs 512 MiB"):
        preflight.check_disk(tmp_path / "runs")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"run\.folder: cannot use"):
        preflight.check_disk(tmp_path / "file" / "runs")


def test_a_broker_that_is_away_is_named(tmp_path: Path, closed_port: int, open_port: int) -> None:
    with pytest.raises(BrokerError, match=rf"Kafka broker at 127\.0\.0\.1:{closed_port} \("):
        preflight.check_services(settings(tmp_path, closed_port, open_port))
    both = KafkaTable(bootstrap_servers=f"127.0.0.1:{closed_port}, 127.0.0.1:{open_port}")
    preflight.check_broker(settings(tmp_path, kafka=both))


def test_a_store_that_is_away_is_named(tmp_path: Path, closed_port: int, open_port: int) -> None:
    given = settings(tmp_path, open_port, closed_port)
    with pytest.raises(StoreError, match=rf"object store at http://127\.0\.0\.1:{closed_port}: "):
        preflight.check_services(given)
    preflight.check_services(settings(tmp_path, open_port, open_port))


def test_a_regions_own_store_is_looked_at(tmp_path: Path, closed_port: int, open_port: int) -> None:
    regions = {"east": S3Table(endpoint_url=f"http://127.0.0.1:{closed_port}", bucket="east")}
    given = settings(tmp_path, open_port, open_port, regions=regions)
    preflight.check_services(given)
    with pytest.raises(StoreError, match=str(closed_port)):
        preflight.check_services(given, "east")
    with pytest.raises(SettingError, match=r"there is no region 'esat'.*did you mean 'east'"):
        preflight.check_settings(given, "main", "rollout", "esat")


def test_embedded_servers_that_were_never_started_are_asked_for(tmp_path: Path) -> None:
    given = settings(tmp_path, kafka=KafkaTable(), embedded=EmbeddedTable(state=tmp_path / "state"))
    with pytest.raises(SettingError, match="offsetrl up"):
        preflight.check_services(given)
    with pytest.raises(SettingError, match="offsetrl up"):
        wiring.open_log(given, client_id="test")


def test_a_bucket_that_is_missing_is_named() -> None:
    class Store:
        def list(self, prefix: str) -> Iterator[Any]:
            raise StoreError("NoSuchBucket")

    with pytest.raises(StoreError, match="bucket 'weights': NoSuchBucket"):
        preflight.check_bucket(Store(), "weights")  # type: ignore[arg-type]


def test_nothing_embedded_starts_when_both_addresses_are_given(tmp_path: Path) -> None:
    given = settings(tmp_path, 9092, 9000, embedded=EmbeddedTable(state=tmp_path / "state"))
    found = wiring.endpoints(given, start=True)
    assert (found.bootstrap_servers, found.s3_url) == ("127.0.0.1:9092", "http://127.0.0.1:9000")
    assert not (found.embedded_kafka or found.embedded_s3) and not (tmp_path / "state").exists()
