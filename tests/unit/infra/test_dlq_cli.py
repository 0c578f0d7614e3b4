"""The commands `dlq` and `drops` hand plain values on, and fail with one line and the right exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli import dlq_commands, main
from infra.config import load
from infra.daemon import resolve

TOML = '[run]\nname = "demo"\n[policies.main]\nmodel = "model"\n[policies.other]\nmodel = "model"\n'


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offsetrl.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main.app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_commands_hand_plain_values_to_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def call(target: str, *arguments: Any, **options: Any) -> int:
        assert callable(resolve(target))
        calls.append((target, arguments, options))
        return 1

    monkeypatch.setattr("infra.cli.options.call", call)
    assert invoke("dlq", "list", "--reason", "empty", "--reason", "invalid", "--json")[0] == 1
    assert invoke("dlq", "show", "0:17", "--policy", "main", "--bytes", "9")[0] == 1
    assert invoke("dlq", "replay", "--policy", "other", "--offset", "0:17", "--offset", "1:2", "--force")[0] == 1
    assert invoke("drops", "--policy", "other", "--solved", "0.5")[0] == 1
    settings = load(Path("offsetrl.toml"), [], {}).settings
    assert all(arguments == (settings,) for _, arguments, _ in calls)
    assert [target for target, *_ in calls] == [
        *(
            f"{dlq_commands.MODULE}:{name}_letter{'s' * many}"
            for name, many in (("list", 1), ("show", 0), ("replay", 1))
        ),
        dlq_commands.DROPS,
    ]
    assert [options for *_, options in calls] == [
        {"policies": ["main", "other"], "reasons": ["empty", "invalid"], "as_json": True},
        {"policy": "main", "place": "0:17", "max_bytes": 9, "as_json": False},
        {
            "policy": "other",
            "reasons": [],
            "places": ["0:17", "1:2"],
            "force": True,
            "dry_run": False,
            "as_json": False,
        },
        {"policies": ["other"], "solved": 0.5, "as_json": False},
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dlq", "show", "0:1"], "several policies: choose with --policy"),
        (["dlq", "list", "--policy", "mian"], "did you mean 'main'"),
        (["dlq", "show", "one", "--policy", "main"], "write PARTITION:OFFSET"),
        (["dlq", "replay", "--policy", "main"], "--reason REASON or --offset"),
        (["dlq", "replay", "--policy", "main", "--reason", "emty"], "did you mean 'empty'"),
        (["drops", "--policy", "x"], "there is no policy 'x'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str], said: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_broker_that_is_away_is_exit_code_3() -> None:
    for command in (["dlq", "list"], ["drops"]):
        code, out, err = invoke(*command, "--set", "kafka.bootstrap_servers=127.0.0.1:1")
        assert (code, out) == (3, "") and "cannot reach the Kafka broker" in err
