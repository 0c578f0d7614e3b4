"""The command `offsetrl`. Importing this file imports no client, no torch and no pydantic, so that `--help` is quick.

Exit codes: 0 done, 1 a check failed, 2 wrong settings or usage, 3 a dependency is away, 4 superseded, 5 a wait hit its
limit, 70 a bug (`infra.lifecycle` says more). Also runs as `python -m infra.cli.main`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from infra.cli import (
    config_commands,
    daemon_commands,
    dlq_commands,
    log_commands,
    model_commands,
    policy_commands,
    run_commands,
    server_commands,
)

app = typer.Typer(
    rich_markup_mode=None,
    name="offsetrl",
    help="Asynchronous reinforcement learning for language-model agents, built on a log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # their tracebacks print local variables, secrets included
    epilog="Exit codes: 0 done, 1 check failed, 2 wrong settings, 3 dependency away, 4 superseded, 5 deadline, 70 bug.",
)

for module in (server_commands, daemon_commands, policy_commands, run_commands, log_commands, dlq_commands):
    module.add(app)
app.add_typer(config_commands.app, name="config")
app.add_typer(model_commands.app, name="model")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("offsetrl"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language-model agents, built on a log."""


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SystemExit as end:
        # A daemon has closed all that is ours by now; taking torch and vLLM apart in order would hold up the drain for seconds.
        if "torch" in sys.modules and isinstance(end.code, int):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise


if __name__ == "__main__":
    main()
