"""Bad input is met before anything starts: one sentence on standard error that says what to do, exit code 2 or 3."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli import main
from infra.embedded import ports
from infra.lifecycle import Exit, Stop
from support.demo import Finished, Home, wait_until
from trainers.new_model import create

pytestmark = pytest.mark.e2e

Usage = namedtuple("Usage", "total used free")
SETTINGS = """
[run]
name = "bad-input"
[kafka]
bootstrap_servers = "127.0.0.1:{kafka}"
[s3]
endpoint_url = "http://127.0.0.1:{s3}"
bucket = "weights"
[policies.alpha]
model = "model"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    create(folder, alphabet="0123456789>", layers=1, hidden=32, heads=1, max_positions=32)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Home]:
    """A folder in which nothing may have been started or be left running, whatever the command was."""
    home = Home(tmp_path / "bad")
    yield home
    wait_until(lambda: not home.left(), f"the end of {home.left()}")
    assert not (home.folder / "state" / "kafka" / "broker.log").exists(), "a broker was started for nothing"
    assert not (home.folder / "state" / "s3" / "output.log").exists(), "an object store was started for nothing"


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def settings(home: Home, model: Path | None = None, kafka: int = 1, s3: int = 1) -> str:
    """A settings file, with a model beside it if one is given."""
    path = home.folder / "offsetrl.toml"
    path.write_text(SETTINGS.format(kafka=kafka, s3=s3))
    if model is not None:
        shutil.copytree(model, home.folder / "model")
    return str(path)


def says(done: Finished, code: int, *words: str) -> None:
    """It ended with this code and one line that holds all the words."""
    done.expect(code)
    lines = [line for line in done.out.splitlines() if line.startswith("offsetrl: ")]
    assert len(lines) == 1 and "Traceback" not in done.out, done.out
    assert all(word in done.out for word in words), done.out


ROLES = ("dispatch", "rollout", "process", "train")


@pytest.mark.parametrize("command", ["demo", "process"])
def test_an_unknown_key_gets_the_nearest_name(place: Home, model: Path, command: str) -> None:
    where = ["--folder", str(place.folder)] if command == "demo" else ["--config", settings(place, model)]
    done = place.command(command, *where, "--set", "policies.alpha.train.learning_rat=0.1")
    says(done, Exit.SETTING, "policies.alpha.train.learning_rat", "did you mean 'learning_rate'?")


def test_an_unknown_key_in_the_file(place: Home, model: Path) -> None:
    config = settings(place, model)
    Path(config).write_text(Path(config).read_text() + "[policies.alpha.train]\nbatch_group = 4\n")
    says(place.command("train", "--config", config), Exit.SETTING, "batch_group", "did you mean 'batch_groups'?")


def test_a_policy_that_is_not_there(place: Home, model: Path) -> None:
    done = place.command("train", "--config", settings(place, model), "--policy", "alfa")
    says(done, Exit.SETTING, "there is no policy 'alfa'", "did you mean 'alpha'?")


def test_a_policy_or_run_name_that_is_not_allowed(place: Home) -> None:
    config = settings(place)
    Path(config).write_text(Path(config).read_text().replace("policies.alpha", 'policies."Al.pha"'))
    says(place.command("process", "--config", config), Exit.SETTING, "Al.pha")
    says(place.command("demo", "--folder", str(place.folder), "--run", "a.b"), Exit.SETTING, "run name 'a.b'")


def test_no_settings_file(place: Home) -> None:
    says(place.command("train"), Exit.SETTING, "offsetrl.toml")


def test_no_such_model_folder(place: Home) -> None:
    done = place.command("train", "--config", settings(place))
    says(done, Exit.SETTING, "policies.alpha.model", str(place.folder / "model"), "offsetrl model new")


def test_a_model_without_a_tokenizer(place: Home, model: Path) -> None:
    config = settings(place, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place.folder / "model" / name).unlink(missing_ok=True)
    says(place.command("train", "--config", config), Exit.SETTING, "has no tokenizer", str(place.folder / "model"))


def test_a_prompt_file_with_a_broken_line(place: Home, model: Path) -> None:
    rows = [json.dumps({"prompt": "1+1>", "answer": "2"})] * 5
    rows[3] = '{"prompt": "2+2>"'
    prompts = place.folder / "prompts.jsonl"
    prompts.write_text("\n".join(rows) + "\n")
    task = [f'policies.alpha.task.settings={{file="{prompts}", reward="operator:eq"}}']
    task += ['policies.alpha.task.environment="prompts"']
    sets = [part for entry in task for part in ("--set", entry)]
    says(place.command("dispatch", "--config", settings(place, model), *sets), Exit.SETTING, f"{prompts}, line 4")
    says(place.command("demo", "--folder", str(place.folder), *sets), Exit.SETTING, f"{prompts}, line 4")


@pytest.mark.parametrize("role", ROLES)
def test_a_broker_that_cannot_be_reached(place: Home, model: Path, role: str, closed_port: int) -> None:
    done = place.command(role, "--config", settings(place, model, kafka=closed_port), timeout_s=60)
    says(done, Exit.DEPENDENCY, "cannot reach the Kafka broker", f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize("role", ["rollout", "train"])
def test_a_store_that_cannot_be_reached(place: Home, model: Path, role: str, closed_port: int, open_port: int) -> None:
    config = settings(place, model, kafka=open_port, s3=closed_port)
    says(
        place.command(role, "--config", config, timeout_s=60),
        Exit.DEPENDENCY,
        "cannot reach the object store",
        f"http://127.0.0.1:{closed_port}",
    )


def test_a_demo_on_servers_of_ones_own_that_are_away(place: Home, closed_port: int, open_port: int) -> None:
    kafka = f'kafka.bootstrap_servers="127.0.0.1:{closed_port}"'
    done = place.command("demo", "--folder", str(place.folder), "--set", kafka, timeout_s=60)
    says(done, Exit.DEPENDENCY, "cannot reach the Kafka broker", f"127.0.0.1:{closed_port}")
    s3 = f'kafka.bootstrap_servers="127.0.0.1:{open_port}"', f's3.endpoint_url="http://127.0.0.1:{closed_port}"'
    done = place.command("demo", "--folder", str(place.folder), "--set", s3[0], "--set", s3[1], timeout_s=60)
    says(done, Exit.DEPENDENCY, "cannot reach the object store", f"http://127.0.0.1:{closed_port}")
    assert not (place.folder / "models").exists(), "nothing was made for a run that cannot be"


@pytest.mark.parametrize("setting", ["embedded.kafka_port", "embedded.s3_port"])
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_port_in_use(place: Home, command: str, setting: str) -> None:
    """Both servers are asked for, and neither is started."""
    (port,) = ports.find_free(1)
    with socket.create_server(("127.0.0.1", port)):
        where = ["--folder", str(place.folder)] if command == "demo" else []
        done = place.command(command, *where, "--set", f"{setting}={port}")
    says(done, Exit.SETTING, f"{setting} is {port}, which is in use by", "pid")
    assert not (place.folder / "models").exists(), "nothing was made for a run that cannot be"


@pytest.mark.parametrize("command", ["up", "demo"])
def test_no_disk(place: Home, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, since a full disk cannot be had without rights on the machine."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(Stop, "install", lambda stop: None)  # the test run's own signals stay as they are
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 5 * 2**20, 5 * 2**20))
    where = ["--folder", str(place.folder)] if command == "demo" else []
    done = CliRunner().invoke(main.app, [command, *where])
    assert done.exit_code == Exit.SETTING, done.stderr
    assert "has 5 MiB free" in done.stderr and "Traceback" not in done.stderr


def test_an_engine_that_is_not_known_to_the_demo(place: Home) -> None:
    done = place.command("demo", "--folder", str(place.folder), "--engine", "vlm")
    says(done, Exit.SETTING, "--engine 'vlm'", "did you mean 'vllm'?")
