"""`offsetrl dlq list`, `show`, `replay`: a policy's dead letters for people. Nothing hostile reaches the terminal as it is."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from infra import preflight
from infra.arrivals import dead_letters, origin
from infra.audit import Source
from infra.dead_letters import Letter, Wanted, check_reasons, collect, parse_origin
from infra.dead_letters_replay import HAS_EFFECT, REFUSED, Fate, chosen, forecast, put_back
from infra.glimpse import glimpse
from infra.lifecycle import Exit
from infra.log import Log
from infra.safe_text import hexdump, safe, safe_bytes
from infra.settings import Settings
from infra.text_table import columns
from infra.writers import open_run
from schemas.errors import SettingError
from schemas.names import topic
from schemas.records import DeadLetter

LATE_ADVICE = """Late records have had their time: a group closes without them, and nothing opens it again. To make use of them,
`offsetrl replay --into RUN` reads the whole topic into a derived run with today's version, each record at its own place
and time; this run is not touched by it."""


def list_letters(settings: Settings, *, policies: Sequence[str], reasons: Sequence[str], as_json: bool) -> int:
    """Print one line per dead letter."""
    wanted = Wanted(check_reasons(reasons))
    with_log(settings, lambda log: _list(log, settings, policies, wanted, as_json))
    return Exit.OK


def show_letter(settings: Settings, *, policy: str, place: str, max_bytes: int, as_json: bool) -> int:
    """Print one dead letter with as much as can be read of it."""
    wanted = parse_origin(place, source_of(settings, policy))

    def body(log: Log) -> int:
        for position, letter in dead_letters(log, settings.run.name, policy):
            if letter is not None and origin(letter) == wanted:
                say(json.dumps(facts(letter, position)) if as_json else "\n".join(shown(letter, position, max_bytes)))
                return Exit.OK
        raise SettingError(f"there is no dead letter of {wanted}; `offsetrl dlq list --policy {policy}` shows all")

    return with_log(settings, body)


def replay_letters(
    settings: Settings,
    *,
    policy: str,
    reasons: Sequence[str],
    places: Sequence[str],
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Forecast, then put back what has an effect (with `force`: all that may be); 1 when something was left for its fate."""
    run, source = settings.run.name, source_of(settings, policy)
    if source.run != run:
        raise SettingError(
            f"{run}.{policy} is a derived run and only reads {source.run}: replay the dead letters of {source.run}"
        )
    if not reasons and not places:
        raise SettingError("say which dead letters are meant: --reason REASON or --offset PARTITION:OFFSET")
    wanted = Wanted(check_reasons(reasons), frozenset(parse_origin(place, source) for place in places))

    def body(log: Log) -> int:
        now_ms = time.time_ns() // 1_000_000
        found = forecast(log, run, policy, wanted, max_tokens=settings.kafka.max_tokens, now_ms=now_ms, force=force)
        if not found:
            raise SettingError(f"no dead letter of {run}.{policy} is meant by this; see `offsetrl dlq list`")
        fates, letters = Counter(each.fate for each in found), chosen(found, force=force)
        if not as_json:
            say("\n".join(told(fates, force)))
        done = 0 if dry_run else put_back(log, run, policy, letters, settings.kafka.patience_s)
        if as_json:
            counts = {fate.value: count for fate, count in fates.items()}
            say(json.dumps({"wanted": len(found), "fates": counts, "chosen": len(letters), "put_back": done}))
        elif dry_run:
            say(f"{len(letters)} would be put back; nothing was written")
        else:
            say(f"{done} put back, at new offsets; the old records stay dead letters, and so the accounts close")
        return Exit.OK if len(letters) == len(found) else Exit.FAILED

    return with_log(settings, body)


def told(fates: Counter[Fate], force: bool) -> list[str]:
    """The forecast in words."""
    lines = []
    for fate, count in sorted(fates.items(), key=lambda pair: (pair[0] in REFUSED, pair[0] not in HAS_EFFECT)):
        remark = ""
        if fate in REFUSED:
            remark = "never put back"
        elif fate not in HAS_EFFECT:
            remark = "put back without an effect, as --force says" if force else "no effect: left alone without --force"
        lines.append(f"{count:>8}  {fate.value:<34} {remark}".rstrip())
    return [*lines, LATE_ADVICE] if Fate.LATE in fates else lines


def shown(letter: DeadLetter, position: int, max_bytes: int) -> list[str]:
    """A letter for the terminal."""
    value = letter.value or b""
    lines = [
        f"origin     {safe(letter.topic)}[{letter.partition}] offset {letter.offset}, appended {when(letter.time_ms)}",
        f"stands     at offset {position} of {safe(letter.run)}.{safe(letter.policy)}.dead-letters",
        f"reason     {safe(letter.reason)}",
        f"detail     {safe(letter.detail, 2000)}",
        f"key        {safe_bytes(letter.key)}",
        *(f"header     {safe(name)} = {safe_bytes(content)}" for name, content in letter.headers),
        f"value      {'none (a tombstone)' if letter.value is None else f'{len(value)} bytes'}",
        *(f"  {row}" for row in hexdump(value, max_bytes)),
    ]
    seen = glimpse(letter.value)
    if seen.kind:
        lines.append(
            f"readable   {seen.kind}, up to the first fault:" if seen.stopped else f"readable   {seen.kind}, whole:"
        )
        lines += [f"  {name:<22} {text}" for name, text in seen.fields]
    if letter.value and seen.stopped:
        lines.append(f"stopped    {seen.stopped}")
    return lines


def facts(letter: DeadLetter, position: int) -> dict[str, Any]:
    """A letter as plain data, its bytes in base64."""
    seen = glimpse(letter.value)
    return {
        "origin": str(origin(letter)),
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "time_ms": letter.time_ms,
        "position": position,
        "reason": letter.reason,
        "detail": letter.detail,
        "key": _base64(letter.key),
        "value": _base64(letter.value),
        "headers": [[name, _base64(content)] for name, content in letter.headers],
        "readable": {"kind": seen.kind, "fields": dict(seen.fields), "stopped": seen.stopped},
    }


def when(time_ms: int) -> str:
    """A time of the log, in UTC; as a number where no calendar has it."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")[:23] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


def source_of(settings: Settings, policy: str) -> Source:
    """Where a policy's trajectories stand."""
    entry = settings.policies[policy].source
    return Source(entry.run, entry.policy or policy) if entry.run else Source(settings.run.name, policy)


def with_log(settings: Settings, body: Callable[[Log], int]) -> int:
    """Open the run's log for one command, with a quick look first at whether the broker is there."""
    preflight.check_broker(settings)
    with open_run(settings, client_id="offsetrl-cli") as log:
        return body(log)


def say(text: str) -> None:
    """Print."""
    typer.echo(text)


def _list(log: Log, settings: Settings, policies: Iterable[str], wanted: Wanted, as_json: bool) -> int:
    found: list[tuple[str, Letter]] = []
    for policy in policies:
        letters, strangers = collect(log, settings.run.name, policy)
        found += [(policy, letter) for letter in letters if wanted.has(letter.reason, letter.origin)]
        if strangers:
            name = topic(settings.run.name, policy, "dead-letters")
            typer.echo(f"{strangers} records on {name} are no dead letters: someone else writes there", err=True)
    if as_json:
        say(json.dumps([_row(policy, letter) for policy, letter in found]))
        return Exit.OK
    heads = ("reason", "topic", "partition", "offset", "time", "bytes", "copies")
    rows = [
        (letter.reason, *letter.origin, when(letter.time_ms), letter.size_bytes, letter.copies) for _, letter in found
    ]
    say("\n".join(columns(heads, rows)) if rows else "no dead letters")
    return Exit.OK


def _row(policy: str, letter: Letter) -> dict[str, Any]:
    return {
        "policy": policy,
        "reason": letter.reason,
        **letter.origin._asdict(),
        "time_ms": letter.time_ms,
        "size_bytes": letter.size_bytes,
        "position": letter.position,
        "copies": letter.copies,
    }


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
