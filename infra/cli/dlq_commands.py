"""`offsetrl dlq` and `offsetrl drops`: what could not be read, and what was left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli import options
from infra.cli.options import Config, Json, Policy, Sets

if TYPE_CHECKING:
    from infra.settings import Settings

PANEL = "Log"
MODULE = "infra.dead_letters_command"
DROPS = "infra.drops_command:command"
dlq = typer.Typer(rich_markup_mode=None, help="Dead letters: what could not be read.", no_args_is_help=True)

Reasons = Annotated[list[str], typer.Option("--reason", help="Only those with this reason; may be given again.")]


def add(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(dlq, name="dlq", rich_help_panel=PANEL)
    app.command(rich_help_panel=PANEL)(drops)


@dlq.command("list")
def list_(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    reasons: Reasons = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Print a line per dead letter; all policies unless one is named."""

    def body() -> int:
        settings = _settings(config, overrides)
        return options.call(
            f"{MODULE}:list_letters", settings, policies=_policies(settings, policy), reasons=reasons, as_json=as_json
        )

    options.finish(body)


@dlq.command()
def show(
    place: Annotated[str, typer.Argument(help="Its origin: PARTITION:OFFSET, or TOPIC/PARTITION/OFFSET.")],
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    max_bytes: Annotated[int, typer.Option("--bytes", min=0, help="Bytes of the hexdump.")] = 256,
    as_json: Json = False,
) -> None:
    """Print one dead letter: origin, reason, headers, a hexdump, and the fields that can be read. As JSON: all bytes, in base64."""

    def body() -> int:
        settings = _settings(config, overrides)
        chosen = _one(settings, policy)
        return options.call(
            f"{MODULE}:show_letter", settings, policy=chosen, place=place, max_bytes=max_bytes, as_json=as_json
        )

    options.finish(body)


@dlq.command()
def replay(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    reasons: Reasons = [],  # noqa: B006
    places: Annotated[
        list[str], typer.Option("--offset", help="This one, by its origin PARTITION:OFFSET; may be given again.")
    ] = [],  # noqa: B006
    force: Annotated[bool, typer.Option("--force", help="Also those that will have no effect.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would become of them, and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what would become of dead letters, and put the original bytes back where they came from, for the processor to read."""

    def body() -> int:
        settings = _settings(config, overrides)
        return options.call(
            f"{MODULE}:replay_letters",
            settings,
            policy=_one(settings, policy),
            reasons=reasons,
            places=places,
            force=force,
            dry_run=dry_run,
            as_json=as_json,
        )

    options.finish(body)


def drops(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    policy: Policy = "",
    solved: Annotated[float, typer.Option(help="A reward of at least this counts as solved.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Show what was left out of training, by reason and task, and whether it is biased by length or difficulty."""

    def body() -> int:
        settings = _settings(config, overrides)
        return options.call(DROPS, settings, policies=_policies(settings, policy), solved=solved, as_json=as_json)

    options.finish(body)


def _settings(config: Config, overrides: list[str]) -> Settings:
    options.quiet_logs(0, False)
    return options.load(config, overrides).settings


def _one(settings: Settings, policy: str) -> str:
    from infra.daemon import choose_policy

    return choose_policy(settings, policy)


def _policies(settings: Settings, policy: str) -> list[str]:
    return [_one(settings, policy)] if policy else list(settings.policies)
