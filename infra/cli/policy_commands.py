"""`offsetrl import` and `eval`: demonstrations in, measurements out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.cli import options
from infra.cli.options import Check, Config, Name, Policy, Quiet, Region, Sets, Verbose

IMPORT = "producers.importer:command"
EVAL = "producers.evaluator:run"


def add(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("import", rich_help_panel="Log")(import_demonstrations)
    app.command("eval", rich_help_panel="Daemons")(evaluate)


def import_demonstrations(
    file: Annotated[Path, typer.Argument(help="JSONL: messages, or prompt and completion, or tokens and loss_mask.")],
    config: Config = None,
    overrides: Sets = [],  # noqa: B006  # Typer copies it
    policy: Policy = "",
    passes: Annotated[int, typer.Option(min=1, help="How often each line is trained on, in so many passes.")] = 1,
    check: Annotated[bool, typer.Option("--check", help="Read the file, say what is wrong with it, and stop.")] = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Put demonstrations on the log as trajectories, for supervised training; a file imported twice counts once."""

    def body() -> int:
        from infra.daemon import choose_policy

        options.quiet_logs(verbose, quiet)
        settings = options.load(config, overrides).settings
        chosen = choose_policy(settings, policy)
        return options.call(IMPORT, settings, policy=chosen, file=file, check=check, passes=passes)

    options.finish(body)


def evaluate(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    version: Annotated[str, typer.Option(metavar="E-V", help="This version [default: the newest].")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with versions as they come, up to the run's last.")
    ] = False,
    every: Annotated[
        int, typer.Option(min=0, help="Follow; every so many versions, and the last. 0: by the settings.")
    ] = 0,
    episodes: Annotated[int, typer.Option(min=0, help="Episodes per version; 0: as the settings say.")] = 0,
    split: Annotated[str, typer.Option(help="held-out, or training for comparison.")] = "held-out",
    name: Name = "",
    region: Region = "",
    check: Check = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Measure published versions on items held out from training; results stand on the evals topic."""
    from infra import daemon
    from infra.cli.daemon_commands import check_role

    given = daemon.Options(
        config=options.config_path(config),
        overrides=overrides,
        policy=policy,
        name=name,
        region=region,
        verbosity=-1 if quiet else verbose,
    )
    if version and (follow or every):
        raise typer.BadParameter("give either --version, or --follow and --every")
    if check:
        options.finish(lambda: check_role("eval", given))
    wanted = {"version": version, "follow": follow or every > 0, "every": every, "episodes": episodes, "split": split}
    raise typer.Exit(daemon.main(EVAL, "eval", given, **wanted))
