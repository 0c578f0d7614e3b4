"""`offsetrl provision` and `topics`: the log's topics, made, checked and looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import options
from infra.cli.options import Config, Json, Sets

if TYPE_CHECKING:
    from infra.log import Log
    from infra.settings import Settings

PANEL = "Log"
topics = typer.Typer(rich_markup_mode=None, help="Look at the topics of a run.", no_args_is_help=True)


def add(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel=PANEL)(provision)
    app.add_typer(topics, name="topics", rich_help_panel=PANEL)


def provision(
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; exit code 1 when something is to do.")
    ] = False,
) -> None:
    """Make the run's topics and check those that are there."""

    def body(log: Log, settings: Settings) -> int:
        from infra import provision as topics_of

        missing = topics_of.missing(log, settings)
        for spec in missing:
            typer.echo(f"{'would make' if dry_run else 'make'} {spec.name} ({spec.partitions} partitions)")
        found = topics_of.differences(log, settings) if dry_run else topics_of.provision(log, settings)
        for difference in found:
            typer.echo(f"differs: {difference}")
        if not dry_run and not found:
            topics_of.publish_schemas(log, settings)
        if not missing and not found:
            typer.echo("all topics are as they must be")
        return 1 if found or (dry_run and missing) else 0

    _with_log(config, overrides, body)


@topics.command()
def count(config: Config = None, overrides: Sets = [], as_json: Json = False) -> None:  # noqa: B006
    """Print first and next offset of each partition of the run."""

    def body(log: Log, settings: Settings) -> int:
        there = log.topics()
        names = sorted(name for name in there if name.startswith(f"{settings.run.name}."))
        rows = [
            {"topic": name, "partition": partition, "start": bounds.start, "end": bounds.end}
            for name in names
            for partition, bounds in sorted(log.bounds(name).items())
        ]
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            for row in rows:
                typer.echo(f"{row['topic']}[{row['partition']}]  {row['start']} to {row['end']}")
        return 0

    _with_log(config, overrides, body)


@topics.command()
def tail(
    topic: Annotated[str, typer.Argument(help="Full name, such as run.main.samples.")],
    partition: Annotated[int, typer.Option(min=0)] = 0,
    records: Annotated[int, typer.Option("--records", "-n", min=1, help="How many, counted from the end.")] = 5,
    config: Config = None,
    overrides: Sets = [],  # noqa: B006
) -> None:
    """Print the last records of a partition as JSON lines; packed arrays are shown by their size."""

    def body(log: Log, settings: Settings) -> int:
        from infra.log import Place
        from schemas.errors import SettingError
        from schemas.names import nearest

        if topic not in (there := log.topics()):
            raise SettingError(f"there is no topic {topic!r}; {nearest(topic, there)}")
        bounds = log.bounds(topic)
        if partition not in bounds:
            raise SettingError(f"{topic} has partitions 0 to {len(bounds) - 1}, and {partition} was asked for")
        place = Place(topic, partition)
        start, end = bounds[partition]
        reader = log.reader({place: max(start, end - records)})
        try:
            while reader.position(place) < end:
                for envelope in reader.poll(1.0):
                    typer.echo(json.dumps({"offset": envelope.offset, **_readable(envelope.value)}, default=_sized))
        finally:
            reader.close()
        return 0

    _with_log(config, overrides, body)


def _readable(value: bytes | None) -> dict[str, Any]:
    from schemas.codec import decode
    from schemas.errors import RecordError

    try:
        record = decode(value)
    except RecordError as error:
        return {"undecodable": str(error)}
    return {"record": type(record).__name__, **asdict(record)}


def _sized(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def _with_log(config: Any, overrides: list[str], body: Callable[[Log, Settings], int]) -> None:
    """Open the run's log for one command, with a quick look first at whether the broker is there."""

    def inner() -> int:
        from infra import preflight
        from infra.writers import open_run

        options.quiet_logs(0, False)
        settings = options.load(config, overrides).settings
        preflight.check_broker(settings)
        with open_run(settings, client_id="offsetrl-cli") as log:
            return body(log, settings)

    options.finish(inner)
