"""`offsetrl config show` and `config schema`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import options
from infra.cli.options import Config, Json, Sets

if TYPE_CHECKING:
    from infra.config import Loaded

app = typer.Typer(rich_markup_mode=None, help="The settings of a run, resolved.", no_args_is_help=True)


@app.command()
def show(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Print every setting as it applies, as TOML lines, secrets masked."""

    def body() -> int:
        loaded = options.load(config, overrides)
        if not as_json:
            print_settings(loaded, origin)
            return 0
        from infra.config import masked

        content: Any = masked(loaded.settings)
        typer.echo(json.dumps({"settings": content, "origins": dict(loaded.origins)} if origin else content, indent=2))
        return 0

    options.finish(body)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the settings file, for editors."""

    def body() -> int:
        from infra.settings import Settings

        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
        return 0

    options.finish(body)


def print_settings(loaded: Loaded, origin: bool) -> None:
    """One line `a.b = value` per setting; values that are not set are comments."""
    from infra.config import flat, shown
    from infra.config_errors import dotted

    for key, value in flat(loaded.settings):
        name = dotted(key)
        line = f"# {name} is not set" if value is None else f"{name} = {toml(shown(key, value))}"
        typer.echo(f"{line:<64}  # {loaded.origins[name]}" if origin else line)


def toml(value: Any) -> str:
    """A value as TOML writes it.

    >>> toml({"a b": [1, True, "x"]})
    '{ "a b" = [1, true, "x"] }'
    """
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)
