from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli import daemon_commands, main, run_commands
from infra.config import load

ROOT = Path(main.__file__).parent.parent.parent
TOML = '[run]\nname = "demo"\n[policies.main]\nmodel = "model"\n'
COMMANDS = "up down status doctor provision config dispatch rollout process train mirror replay audit demo model"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "offsetrl.toml"
    path.write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return path


def invoke(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(main.app, list(arguments), env=environ)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, infra.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    heavy = {
        "kafka",
        "boto3",
        "botocore",
        "torch",
        "vllm",
        "transformers",
        "numpy",
        "fastavro",
        "pydantic",
        "structlog",
    }
    assert not heavy & set(done.stdout.split())
    ours = {name for name in done.stdout.split() if name.startswith(("infra.", "producers", "consumers", "trainers"))}
    assert all(name.startswith("infra.cli") for name in ours)


def test_help_names_every_command() -> None:
    code, out, _ = invoke("--help")
    assert code == 0 and all(f" {command} " in out for command in COMMANDS.split())


@pytest.mark.parametrize(
    "command", [*COMMANDS.split(), "config show", "config schema", "model new", "model smollm2", "topics tail"]
)
def test_every_command_has_help(command: str) -> None:
    code, out, _ = invoke(*command.split(), "--help")
    assert code == 0 and "Usage" in out


def test_the_targets_are_written_as_module_and_function() -> None:
    targets = [target for target, _ in daemon_commands.DAEMONS.values()]
    for target in [*targets, run_commands.DEMO, run_commands.AUDIT, run_commands.REPLAY]:
        module, _, function = target.partition(":")
        assert module and function.isidentifier()


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "infra.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "0.1.0\n"


def test_settings_are_printed_with_their_origin_and_load_again(config: Path) -> None:
    code, out, _ = invoke("config", "show", "--origin", "--set", "run.seed=7")
    assert code == 0
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    assert lines["run.name"].endswith("# file offsetrl.toml") and lines["run.seed"].endswith("# --set")
    assert tomllib.loads(out)["run"] == {
        "name": "demo",
        "seed": 7,
        "folder": str(config.parent.resolve() / "runs"),
        "partitions": 2,
        "inboxes": 16,
    }


def test_settings_as_json(config: Path) -> None:
    code, out, _ = invoke("config", "show", "--json", "--origin")
    shown = json.loads(out)
    assert code == 0 and shown["settings"]["run"]["name"] == "demo" and shown["origins"]["run.seed"] == "default"


def test_the_schema_is_json() -> None:
    code, out, _ = invoke("config", "schema")
    assert code == 0 and "policies" in json.loads(out)["properties"]


@pytest.mark.parametrize("command", ["config show", "config show --json", "process --check"])
def test_no_secret_is_printed(config: Path, command: str) -> None:
    environ = {"OFFSETRL_KAFKA__SASL_PASSWORD": "s3cr3t-KAFKA", "OFFSETRL_S3__SECRET_KEY": "s3cr3t-S3"}
    code, out, err = invoke(*command.split(), environ=environ)
    assert code == 0 and "***" in out and "s3cr3t" not in out + err


def test_check_prints_and_stops_for_every_daemon(config: Path) -> None:
    (config.parent / "model").mkdir()
    for name, text in (("config.json", '{"model_type": "qwen2"}'), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (config.parent / "model" / name).write_text(text)
    for role in daemon_commands.DAEMONS:
        code, out, err = invoke(role, "--check")
        assert (code, err) == (0, "") and 'run.name = "demo"' in out


def test_check_checks(config: Path) -> None:
    code, _, err = invoke("train", "--check")
    assert code == 2 and "there is no model folder" in err
    code, _, err = invoke("train", "--check", "--policy", "mian")
    assert code == 2 and "did you mean 'main'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--set", "policies.main.train.learning_rat=1"], "did you mean 'learning_rate'"),
        (["rollout", "--config", "absent.toml"], "there is no settings file absent.toml"),
        (["process", "--name", "Bad Name"], "daemon name 'Bad Name' is not allowed"),
        (["rollout", "--region", "east"], "there is no region 'east'"),
        (["audit", "--policy", "other"], "there is no policy 'other'"),
        (["replay", "--into", "demo"], "is the run itself"),
        (["provision", "--set", "kafka.bootstrap_servers=x"], "must be host:port"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(config: Path, arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=config.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2(config: Path) -> None:
    assert invoke("train", "--nonsense")[0] == 2
    assert invoke("replay")[0] == 2


def test_a_broker_that_is_away_is_exit_code_3(config: Path) -> None:
    code, out, err = invoke("topics", "count", "--set", "kafka.bootstrap_servers=127.0.0.1:1")
    assert (code, out) == (3, "") and "cannot reach the Kafka broker at 127.0.0.1:1" in err


def test_status_and_down_need_neither_file_nor_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = invoke("status")
    assert code == 0 and "does not run" in out and "offsetrl up" in out
    code, out, _ = invoke("status", "--json")
    assert json.loads(out)["reachable"] is False
    assert invoke("down")[:2] == (0, "nothing was running\n")


def test_commands_hand_plain_values_to_their_modules(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def call(target: str, *arguments: Any, **options: Any) -> int:
        calls.append((target, arguments, options))
        return 1

    monkeypatch.setattr("infra.cli.options.call", call)
    assert (
        invoke("demo", "--run", "r", "--policies", "2", "--steps", "9", "--json", "out.json", "--set", "run.seed=1")[0]
        == 1
    )
    assert invoke("audit")[0] == 1
    assert invoke("replay", "--into", "again", "--advantage", "rloo", "--steps", "3")[0] == 1
    (demo, audit, replay) = calls
    assert demo[0] == run_commands.DEMO and demo[1] == (["run.seed=1"],)
    assert demo[2] == {
        "run": "r",
        "engine": "",
        "policies": 2,
        "steps": 9,
        "folder": Path("demo"),
        "json_path": Path("out.json"),
        "stall_s": 120.0,
    }
    settings = load(config, [], {}).settings
    assert audit == (run_commands.AUDIT, (settings,), {"policies": ["main"], "json_path": None})
    wanted = {"policy": "main", "into": "again", "advantage": "rloo", "steps": 3, "json_path": None}
    assert replay == (run_commands.REPLAY, (Path("offsetrl.toml"), []), wanted)


def test_every_module_of_the_command_line_can_be_imported() -> None:
    for path in (ROOT / "infra" / "cli").glob("*.py"):
        importlib.import_module(f"infra.cli.{path.stem}")


def test_a_reader_that_has_seen_enough_is_no_error(config: Path) -> None:
    command = [sys.executable, "-m", "infra.cli.main", "config", "schema"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=config.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 0)
