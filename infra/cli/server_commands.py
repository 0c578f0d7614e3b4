"""`offsetrl up`, `down`, `status`, `doctor`: the servers, and whether all is well."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import options
from infra.cli.options import Config, Json, Sets

if TYPE_CHECKING:
    from infra.settings import Settings

PANEL = "Servers"


def add(app: typer.Typer) -> None:
    """Add the commands. None needs a settings file: without one the defaults apply."""
    for command in (up, down, status, doctor):
        app.command(rich_help_panel=PANEL)(command)


def up(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    as_json: Json = False,
    fetch: Annotated[bool, typer.Option("--fetch", help="Only fetch what the servers are made of, and stop.")] = False,
) -> None:
    """Start the embedded broker and object store, unless the settings name others; print how to reach them."""

    def body() -> int:
        from infra.wiring import endpoints

        settings = options.load(config, overrides, needed=False).settings
        if fetch:
            from infra.embedded import java

            jars = java.kafka_jars(settings.embedded.kafka_version, settings.embedded.state)
            typer.echo(f"{len(jars)} jars of the broker, {java.s3proxy_jar(settings.embedded.state).name}")
            return 0
        found = endpoints(settings, start=True)
        if as_json:
            typer.echo(json.dumps({"bootstrap_servers": found.bootstrap_servers, "s3_url": found.s3_url}))
            return 0
        kafka, s3 = ("embedded" if own else "yours" for own in (found.embedded_kafka, found.embedded_s3))
        typer.echo(f"Kafka         {found.bootstrap_servers}  ({kafka})")
        typer.echo(f"object store  {found.s3_url or 'AWS'}  ({s3})")
        typer.echo("The other commands find them by themselves. For tools of your own:")
        typer.echo(f"  export KAFKA_BOOTSTRAP_SERVERS={found.bootstrap_servers}")
        if found.s3_url:
            typer.echo(f"  export AWS_ENDPOINT_URL_S3={found.s3_url}")
        return 0

    options.finish(body)


def down(config: Config = None, overrides: Sets = []) -> None:  # noqa: B006
    """Stop the embedded servers; their data stays."""

    def body() -> int:
        from infra.embedded import servers

        stopped = servers.down(options.load(config, overrides, needed=False).settings.embedded.state)
        typer.echo(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
        return 0

    options.finish(body)


def status(config: Config = None, overrides: Sets = [], as_json: Json = False) -> None:  # noqa: B006
    """Show servers, daemons with the weights they use, and the newest evaluation of each policy."""

    def body() -> int:
        from infra.cli.status import server_rows
        from infra.embedded import servers

        settings = options.load(config, overrides, needed=False).settings
        embedded = [asdict(found) for found in servers.status(settings.embedded.state)]
        reachable, daemons, evals = _said(settings)
        if as_json:
            typer.echo(
                json.dumps(
                    {"servers": embedded, "reachable": reachable, "daemons": daemons, "evals": evals}, default=str
                )
            )
            return 0
        for line in server_rows(embedded):
            typer.echo(line)
        if not reachable:
            typer.echo("the broker cannot be reached: run `offsetrl up`, or see `offsetrl doctor`")
        _table(daemons)
        _table(evals)
        return 0

    options.finish(body)


def _said(settings: Settings) -> tuple[bool, list[dict[str, Any]], list[dict[str, Any]]]:
    """Whether the broker answers, and what its topics say of daemons and of evaluations."""
    from infra import preflight
    from infra.cli.status import daemons, evaluations
    from infra.writers import open_run
    from schemas.errors import BrokerError, SettingError

    try:
        preflight.check_broker(settings)
    except (BrokerError, SettingError):
        return False, [], []
    with open_run(settings, client_id="status") as log:
        return True, daemons(log, settings), evaluations(log, settings)


def doctor(config: Config = None, overrides: Sets = [], as_json: Json = False) -> None:  # noqa: B006
    """Examine everything a run needs; each line that is not well says what to do."""

    def body() -> int:
        settings = options.load(config, overrides, needed=False).settings
        from infra.doctor import examine

        checks = examine(settings)
        if as_json:
            typer.echo(json.dumps([asdict(check) for check in checks], default=str))
        else:
            for check in checks:
                typer.echo(f"{'ok ' if check.ok else 'BAD'}  {check.name:<20} {check.got}")
                if not check.ok:
                    typer.echo(f"     -> {check.remedy}")
        return 0 if all(check.ok for check in checks) else 1

    options.finish(body)


def _table(rows: list[dict[str, Any]]) -> None:
    """Plain columns."""
    if not rows:
        return
    heads = list(rows[0])
    cells = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
