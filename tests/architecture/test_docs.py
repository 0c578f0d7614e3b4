"""What the pages say is so: paths, make targets, commands, quoted lines, generated parts; and no page names a machine or a registry."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.cli.main import app
from support import make_docs

ROOT = make_docs.ROOT
ROOMS = make_docs.ROOMS
TOP = (*ROOMS, "tests", ".ci")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "infra/docs").rglob("*.md")])
USERS_OWN = {"guess.py", "offsetrl.toml", "prompts.py", "rewards.py", "prompts.jsonl", "result.json"}
"""Files that a reader of the pages makes."""
RUNS_OWN = ("demo/",)
"""Folders that commands make."""


def committed() -> Iterator[Path]:
    """Every file of the repository but pictures: top-level files and the known folders."""
    for top in TOP:
        yield from (
            p for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".png"
        )
    yield from (p for p in ROOT.iterdir() if p.is_file() and p.name != ".ready")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def plain(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def fences(page: Path, *languages: str) -> Iterator[str]:
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def inline(page: Path) -> Iterator[str]:
    yield from re.findall(r"`([^`\n]+)`", plain(page))


# Generated parts ----------------------------------------------------------------------------------------------------


def test_generated_pages_and_the_tree_are_current() -> None:
    old = [name for name, text in make_docs.expected().items() if (ROOT / name).read_text("utf-8") != text]
    assert not old, f"run `make docs`: {old}"


def test_the_tree_names_every_file_and_says_what_it_is() -> None:
    missing = [
        relative(ROOT / path)
        for room in ROOMS
        for path in make_docs.files_of(room)
        if not make_docs.first_line(path) and path.name != ".gitkeep"
    ]
    assert not missing, (
        f"these files do not say what they are (docstring, doc, or `_PLAIN_FILES` in make_docs): {missing}"
    )


# What is named exists -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", plain(page))
    wrong = [target for target in targets if not target.startswith("http") and not (page.parent / target).exists()]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_path_named_exists(page: Path) -> None:
    wrong = []
    for code in inline(page):
        path, _, test = code.partition("::")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", path) or path in USERS_OWN or path.startswith(RUNS_OWN):
            continue
        is_path = path.partition("/")[0] in TOP and "/" in path
        if not is_path and not path.endswith((".py", ".md", ".toml", ".avsc", ".sh")):
            continue
        found = (ROOT / path).exists() or (page.parent / path).exists()
        if not found or (test and f"def {test}(" not in (ROOT / path).read_text("utf-8")):
            wrong.append(code)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_make_target_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = "\n".join([*(c for c in inline(page)), *fences(page, "sh")])
    assert set(re.findall(r"\bmake ([a-z0-9]+)", text)) <= targets


def test_make_shows_every_target_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = set(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split())
    assert phony == set(re.findall(r"^([a-z0-9]+):.*## ", text, re.MULTILINE))


# Commands -----------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[str]:
    """Every `offsetrl ...` of a page, without redirections, pipes and comments."""
    for body in fences(page, "sh"):
        for piece in re.split(r"\n|\||&&|;|&(?!\d)|\bdo\b|\buntil\b", re.sub(r"#.*", "", body)):
            if piece.strip().startswith("offsetrl "):
                yield re.sub(r"\s*\d?>\s*\S+", "", piece).strip()
    for arguments in re.findall(r"make demo ARGS='([^']*)'", page.read_text("utf-8")):
        yield f"offsetrl demo {arguments}"
    for code in inline(page):
        if code.startswith("offsetrl ") and not code.startswith("offsetrl ..."):
            yield code


def parse(line: str) -> None:
    """Take a command line apart as `offsetrl` does, without running it. Raises what the parser raises."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{line!r}: there is no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    if words and words != ["--help"]:
        command.make_context(command.name, words)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_parses(page: Path) -> None:
    for line in commands(page):
        for role in ("dispatch", "rollout", "process", "train") if "$role" in line else ("",):
            spoken = line.replace("$role", role)
            if spoken not in ("offsetrl COMMAND --help",):
                parse(spoken)


def test_the_parser_of_these_tests_refuses_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no command"):
        parse("offsetrl dispach")
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse("offsetrl up --nonsense")


def test_the_readme_is_found_to_hold_its_commands() -> None:
    found = list(commands(ROOT / "README.md"))
    assert {"offsetrl up", "offsetrl down", "offsetrl audit", "offsetrl dispatch --check"} <= set(found)


# What operations.md quotes, and settings in examples ----------------------------------------------------------------


@functools.cache
def sources() -> str:
    return "\n".join(p.read_text("utf-8") for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")))


def test_log_lines_and_figures_quoted_in_operations_are_in_the_code() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "infra/docs/operations.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and line.count("|") == 5
    ]
    assert len(rows) > 20
    quoted = {code for row in rows for cell in row[1:3] for code in re.findall(r"`([^`]+)`", cell)}
    missing = {code for code in quoted if code not in sources()}
    assert not missing


def test_exit_codes_are_those_of_the_code() -> None:
    from infra.lifecycle import Exit

    page = (ROOT / "infra/docs/operations.md").read_text("utf-8")
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(",")}
    assert codes == {*(int(code) for code in Exit), 130, 143}


def test_every_glossary_word_is_in_order() -> None:
    words = re.findall(r"^\| ([a-z][a-z ,]*) \|", (ROOT / "infra/docs/glossary.md").read_text("utf-8"), re.MULTILINE)[
        1:
    ]
    assert len(words) > 30 and words == sorted(words)


def test_settings_in_examples_are_valid(tmp_path: Path) -> None:
    from infra.config import load

    for page in PAGES:
        for body in fences(page, "toml"):
            tomllib.loads(body)
            (tmp_path / "offsetrl.toml").write_text(body)
            assert load(tmp_path / "offsetrl.toml", environ={}).settings.policies


def test_the_example_of_a_new_component_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import doctest

    from consumers.components import make_recipe
    from consumers.group_rewards import GroupRewards

    (body,) = fences(ROOT / "CONTRIBUTING.md", "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(body, "CONTRIBUTING.md", "exec"), names)  # our own page, to see that it works
    tests = doctest.DocTestFinder().find(names["ranked"], globs=names)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries == 1 and runner.failures == 0
    (tmp_path / "ranked_example.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = "ranked_example:ranked"
    recipe = make_recipe(advantage=own, settings={own: {"scale": 2.0}}, group_size=3)
    assert list(recipe.advantage(GroupRewards.of([0.1, 0.9, 0.5]))) == [-2.0, 2.0, 0.0]


def test_names_of_components_in_the_changelog_exist() -> None:
    known = {name for _, _, table in make_docs.components() for name in table}
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z][a-z-]+)`", text))
    commands_known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert named <= known | commands_known, named - known - commands_known


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_dotted_names_lead_to_code(page: Path) -> None:
    for code in inline(page):
        if re.fullmatch(rf"({'|'.join(ROOMS)})(\.\w+)+", code):
            module = code
            while (
                not (ROOT / (module.replace(".", "/") + ".py")).exists()
                and not (ROOT / module.replace(".", "/")).is_dir()
            ):
                module = module.rpartition(".")[0]
                assert module, code
            rest = code.removeprefix(module).lstrip(".")
            assert not rest or hasattr(importlib.import_module(module), rest), code


# Manners ------------------------------------------------------------------------------------------------------------

_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("repo1", "maven", "org"),
        ("repo", "maven", "apache", "org"),
        ("maven", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
    )
)
_MACHINE = re.compile(r"(?<![\w.$}])/(?:work|root|home|Users)(?=/|\b[^\w-])|/tmp/w\b")


def test_no_file_names_a_registry_or_a_path_of_a_machine() -> None:
    wrong = []
    for path in committed():
        text = path.read_text("utf-8")
        wrong += [(relative(path), host) for host in _HOSTS if host in text]
        if path != Path(__file__):
            wrong += [(relative(path), match[0]) for match in _MACHINE.finditer(text)]
    assert not wrong


def test_lines_of_pages_written_by_hand_fit_a_screen() -> None:
    for page in PAGES:
        for number, line in enumerate(plain(page).splitlines(), 1):
            assert len(line) <= 140 or line.startswith(("|", "<!--", "![", "    ")), f"{relative(page)}:{number}"


def test_pictures_are_small_and_stand_alone() -> None:
    for picture in (ROOT / "infra/docs/pictures").iterdir():
        assert picture.stat().st_size < 300_000, picture.name
        if picture.suffix == ".svg":
            text = re.sub(r"xmlns(:\w+)?=\S+|<!--.*?-->", "", picture.read_text("utf-8"), flags=re.DOTALL)
            assert "http" not in text and "<script" not in text, picture.name


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert text.lstrip().startswith("Apache License") and "END OF TERMS AND CONDITIONS" in text and len(text) > 11_000
