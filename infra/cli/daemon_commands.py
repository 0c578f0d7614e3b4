"""`offsetrl dispatch`, `rollout`, `process`, `train`, `mirror`: one process, one role of one policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from infra.cli import options
from infra.cli.options import Check, Config, Name, Policy, Quiet, Region, Sets, Verbose

if TYPE_CHECKING:
    from infra.daemon import Options

PANEL = "Daemons"
DAEMONS = {
    "dispatch": ("producers.dispatcher:run", "Ask for rollouts: admission, deadlines, re-issue, closing of groups."),
    "rollout": (
        "producers.rollout_worker:run",
        "Run episodes in an inference engine, with weights picked up in flight.",
    ),
    "process": ("consumers.processor:run", "Assemble groups, filter them, estimate advantages."),
    "train": ("trainers.trainer:run", "Plan batches, take steps, publish weights."),
    "mirror": ("infra.weights.mirror:run", "Copy weights from the home bucket to a region's, verified."),
}


def add(app: typer.Typer) -> None:
    """Add one command per daemon."""
    for role in DAEMONS:
        app.command(role, help=DAEMONS[role][1], rich_help_panel=PANEL)(_command(role))


def _command(role: str):  # type: ignore[no-untyped-def]  # Typer reads the inner function's own annotations
    def command(
        config: Config = None,
        overrides: Sets = [],  # noqa: B006  # Typer copies it
        policy: Policy = "",
        name: Name = "",
        region: Region = "",
        check: Check = False,
        verbose: Verbose = 0,
        quiet: Quiet = False,
    ) -> None:
        from infra import daemon

        path = options.config_path(config)
        given = daemon.Options(
            config=path,
            overrides=overrides,
            policy=policy,
            name=name,
            region=region,
            verbosity=-1 if quiet else verbose,
        )
        if check:
            options.finish(lambda: check_role(role, given))
        raise typer.Exit(daemon.main(DAEMONS[role][0], role, given))

    return command


def check_role(role: str, given: Options) -> int:
    """Print the settings, and check all of them that can be checked without a server."""
    from infra import preflight
    from infra.cli.config_commands import print_settings
    from infra.daemon import choose_policy

    loaded = options.load(given.config, list(given.overrides))
    policy = choose_policy(loaded.settings, given.policy)
    print_settings(loaded, origin=False)
    preflight.check_settings(loaded.settings, policy, role, given.region)
    return 0
