"""Options that several commands share, and how they become plain data. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from infra.config import Loaded

DEFAULT_CONFIG = Path("offsetrl.toml")

Config = Annotated[Optional[Path], typer.Option("--config", help="Settings file [default: offsetrl.toml].")]  # noqa: UP045
Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="One setting, above file and environment.")]
Policy = Annotated[str, typer.Option("--policy", help="Name of the policy; may be left out when there is one.")]
Name = Annotated[str, typer.Option("--name", help="Name of this process; workers of a policy differ in it.")]
Region = Annotated[str, typer.Option("--region", help="Region, as in [regions.NAME]; the trainers' home if left out.")]
Check = Annotated[bool, typer.Option("--check", help="Print the resolved settings, secrets masked, and stop.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="More logs; twice for those of clients.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def config_path(config: Path | None, *, needed: bool = True) -> Path | None:
    """The settings file: the one given, else offsetrl.toml here; None when it is absent and not needed."""
    if config is not None:
        return config
    return DEFAULT_CONFIG if needed or DEFAULT_CONFIG.exists() else None


def load(config: Path | None, overrides: list[str], *, needed: bool = True) -> Loaded:
    """Settings of a command that is no daemon; their secrets are hidden in all that it prints from here on."""
    from infra.config import load as load_settings
    from infra.config import secrets
    from infra.secrecy import redact

    loaded = load_settings(config_path(config, needed=needed), overrides)
    redact.add(secrets(loaded.settings))
    return loaded


def finish(body: Callable[[], int]) -> None:
    """Run a command's body at the edge and end with its exit code."""
    from infra.daemon import edge

    raise typer.Exit(edge(lambda: _into_closed_pipes(body)))


def _into_closed_pipes(body: Callable[[], int]) -> int:
    """A reader that has seen enough, such as `head`, is no error."""
    try:
        code = body()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 0


def call(target: str, *arguments: Any, **options: Any) -> int:
    """Call `module:function` and return its exit code; imported only now."""
    from infra.daemon import resolve

    return int(resolve(target)(*arguments, **options))


def quiet_logs(verbose: int, quiet: bool) -> None:
    """Logging of a command that is no daemon: warnings only, unless asked for more."""
    from infra import logs

    logs.configure(-1 if quiet or not verbose else verbose - 1)
