"""`offsetrl import` and `eval` on the command line, and where evaluations show up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra import daemon
from infra.cli import main, policy_commands
from infra.cli.status import evaluations
from infra.config import load
from infra.demo.children import children
from infra.demo.loop import _end_evaluators
from infra.demo.run import Run
from infra.memory_log import MemoryLog
from infra.provision import topic_specs
from infra.settings import Settings
from schemas.errors import DeadlineExceeded
from support.loop import append
from support.samples import evaluation

TOML = '[run]\nname = "demo"\n[policies.main]\nmodel = "model"\n'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "offsetrl.toml"
    path.write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return path


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main.app, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("command", ["import", "eval"])
def test_they_are_in_the_help_and_have_help_of_their_own(command: str) -> None:
    assert f" {command} " in invoke("--help")[1]
    code, said = invoke(command, "--help")
    assert code == 0 and "Usage" in said


def test_an_import_gets_plain_values(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def call(*arguments: Any, **given: Any) -> int:
        calls.append((arguments, given))
        return 0

    monkeypatch.setattr("infra.cli.options.call", call)
    assert invoke("import", "demos.jsonl", "--passes", "3", "--check")[0] == 0
    ((target, settings), given) = calls[0]
    assert target == policy_commands.IMPORT and settings == load(config, [], {}).settings
    assert given == {"policy": "main", "file": Path("demos.jsonl"), "check": True, "passes": 3}


def test_an_import_of_a_file_that_is_not_there_ends_with_code_2(config: Path) -> None:
    code, said = invoke("import", "demos.jsonl")
    assert code == 2 and "there is no model folder" in said


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), {}),
        (("--version", "1-7", "--episodes", "9"), {"version": "1-7", "episodes": 9}),
        (("--follow",), {"follow": True}),
        (("--every", "4", "--split", "training"), {"follow": True, "every": 4, "split": "training"}),
    ],
)
def test_an_evaluator_is_told_what_is_wanted(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], wanted: dict[str, Any]
) -> None:
    calls: list[Any] = []

    def run(target: str, role: str, given: daemon.Options, **said: Any) -> int:
        calls.append((target, role, given.config, said))
        return 5

    monkeypatch.setattr(daemon, "main", run)
    assert invoke("eval", *arguments)[0] == 5
    plain = {"version": "", "follow": False, "every": 0, "episodes": 0, "split": "held-out"}
    assert calls == [(policy_commands.EVAL, "eval", Path("offsetrl.toml"), plain | wanted)]


@pytest.mark.parametrize("more", [("--follow",), ("--every", "2")])
def test_one_version_and_all_that_come_exclude_each_other(config: Path, more: tuple[str, ...]) -> None:
    code, said = invoke("eval", "--version", "1-7", *more)
    assert code == 2 and "give either --version, or --follow and --every" in " ".join(said.split())


def test_what_is_wanted_reaches_the_daemons_function(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def function(given: Any, **said: Any) -> int:
        seen.append((given, said))
        return 3

    monkeypatch.setattr(daemon, "resolve", lambda target: function)
    assert daemon.resolve_later("a:b", every=2)("the daemon") == 3  # type: ignore[arg-type]
    assert seen == [("the daemon", {"every": 2})]


def make_settings(every: int = 2) -> Settings:
    policies = {"main": {"model": "m", "eval": {"every": every}}, "other": {"model": "m"}}
    return Settings.model_validate({"run": {"name": "demo"}, "policies": policies})


def test_status_shows_the_newest_evaluation_that_counts() -> None:
    settings, log = make_settings(), MemoryLog()
    log.create(topic_specs(settings))
    fields: dict[str, Any] = {"epoch": 1, "task": "t", "low": 0.0, "high": 1.0}
    for version, split, mean in [
        (4, "held-out", 0.25),
        (8, "held-out", 0.5),
        (8, "held-out", 0.9),
        (2, "training", 0.75),
    ]:
        append(log, "evals", evaluation(version=version, split=split, mean_reward=mean, **fields))
    rows = evaluations(log, settings)
    assert [(row["policy"], row["version"], row["split"], row["mean_reward"][:5]) for row in rows] == [
        ("main", "1-2", "training", "0.750"),
        ("main", "1-8", "held-out", "0.500"),
    ]
    assert evaluations(MemoryLog(), settings) == []


def make_run(folder: Path) -> Run:
    return Run(make_settings(), folder / "run.toml", folder, "scripted", 0, 0.0)


def test_a_run_has_evaluators_where_the_settings_ask_for_them(tmp_path: Path) -> None:
    specs = {spec.name: spec.argv for spec in children(make_run(tmp_path), ["run.seed=1"])}
    assert "eval-main" in specs and "eval-other" not in specs and len(specs) == 9
    argv = list(specs["eval-main"])
    assert argv[argv.index("infra.cli.main") + 1] == "eval" and "--follow" in argv
    assert not any("--follow" in argv for name, argv in specs.items() if name != "eval-main")


class Supervised:
    """Notes what is waited for and what is ended."""

    def __init__(self, late: bool) -> None:
        self.late, self.did = late, list[tuple[str, list[str]]]()

    def wait(self, names: list[str], timeout_s: float) -> None:
        self.did.append(("wait", names))
        if self.late:
            raise DeadlineExceeded("eval-main still ran")

    def terminate(self, names: list[str], grace_s: float) -> None:
        self.did.append(("terminate", names))


class Looks:
    """A watch and a view."""

    def __init__(self, done: bool) -> None:
        self.done, self.said = done, list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("done", [False, True])
def test_evaluators_finish_a_run_that_is_done_and_no_other(tmp_path: Path, done: bool, late: bool) -> None:
    supervisor, looks = Supervised(late), Looks(done)
    _end_evaluators(make_run(tmp_path), supervisor, looks, looks)  # type: ignore[arg-type]
    waited = [("wait", ["eval-main"])] if done else []
    assert supervisor.did == [*waited, ("terminate", ["eval-main"])]
    assert any("offsetrl eval --follow" in text for text in looks.said) is (done and late)
