"""`offsetrl demo`, `audit`, `replay`: commands over a whole run. Each calls `command(settings, ...)` of its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from infra.cli import options
from infra.cli.options import Config, Policy, Quiet, Sets, Verbose

PANEL = "Runs"
RUN = "infra.run_command:command"
DEMO = "infra.demo.command:command"
AUDIT = "infra.audit_command:command"
REPLAY = "infra.replay_command:command"

JsonFile = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write the result here.")]  # noqa: UP045


def add(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, demo, audit, replay):
        app.command(rich_help_panel=PANEL)(command)


def run(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    json_file: JsonFile = None,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Run every role of the settings on this machine until the run has ended or you stop it, then show the accounts."""

    def body() -> int:
        options.quiet_logs(verbose, quiet)
        return options.call(RUN, options.config_path(config), list(overrides), json_path=json_file)

    options.finish(body)


def demo(
    json_file: JsonFile = None,
    run: Annotated[str, typer.Option("--run", help="Name of the run; a new one each time if left out.")] = "",
    engine: Annotated[str, typer.Option(help="vllm or transformers; vllm where it is installed if left out.")] = "",
    policies: Annotated[int, typer.Option(min=1, max=8, help="Policies that train side by side.")] = 1,
    steps: Annotated[int, typer.Option(min=0, help="Steps per policy; 0: the demo's own number.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where settings, model, servers' data, logs and report go.")] = Path(
        "demo"
    ),
    stall_s: Annotated[
        float,
        typer.Option(min=1, help="After the first step: give up after so long without a step or a version, seconds."),
    ] = 120.0,
    overrides: Sets = [],  # noqa: B006
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Run the whole loop on this machine, watch it learn, check it, and write a report."""

    def body() -> int:
        options.quiet_logs(verbose, quiet)
        return options.call(
            DEMO,
            list(overrides),
            run=run,
            engine=engine,
            policies=policies,
            steps=steps,
            folder=folder,
            json_path=json_file,
            stall_s=stall_s,
        )

    options.finish(body)


def audit(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    json_file: JsonFile = None,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Account for every offset of the trajectories, from the log alone; all policies unless one is named."""

    def body() -> int:
        options.quiet_logs(verbose, quiet)
        settings = options.load(config, overrides).settings
        if policy:
            from infra.daemon import choose_policy

            choose_policy(settings, policy)
        return options.call(
            AUDIT, settings, policies=[policy] if policy else list(settings.policies), json_path=json_file
        )

    options.finish(body)


def replay(
    into: Annotated[str, typer.Option("--into", help="Name of the derived run that gets outcomes and steps.")],
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    advantage: Annotated[str, typer.Option(help="Another estimator; the policy's own if left out.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="Train so many steps from it; 0: outcomes only.")] = 0,
    json_file: JsonFile = None,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Run stored trajectories through a processor and a trainer again, with no worker running; the source is only read."""

    def body() -> int:
        from infra.daemon import choose_policy
        from schemas.errors import SettingError
        from schemas.names import check_name

        options.quiet_logs(verbose, quiet)
        settings = options.load(config, overrides).settings
        if check_name("run", into) == settings.run.name:
            raise SettingError(f"--into {into!r} is the run itself: name another, so that its topics stay as they are")
        return options.call(
            REPLAY,
            options.config_path(config),
            overrides,
            policy=choose_policy(settings, policy),
            into=into,
            advantage=advantage,
            steps=steps,
            json_path=json_file,
        )

    options.finish(body)
