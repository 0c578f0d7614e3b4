"""`offsetrl audit`: the accounts of a run's policies as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.audit import Audit, Source, audit
from infra.lifecycle import Exit
from infra.log import Log
from infra.settings import Settings
from infra.writers import open_run

FIGURES = ("produced", "trained", "dropped", "dead_lettered", "late", "superseded", "pending", "unaccounted", "twice")


def command(settings: Settings, *, policies: Sequence[str], json_path: Path | None = None) -> int:
    """Audit the policies; exit code 1 when the books of any do not close."""
    with open_run(settings, client_id="audit") as log:
        return show([audit_policy(log, settings, policy) for policy in policies], json_path)


def show(audits: Sequence[Audit], json_path: Path | None) -> int:
    """Print the accounts, write them as JSON where wanted; the exit code."""
    console = Console()
    console.print(table(audits))
    for found in audits:
        for finding in found.accounts.findings:
            console.print(f"{found.run}.{found.policy}: {finding}", style="red", markup=False)
    if json_path is not None:
        json_path.write_text(json.dumps([facts(found) for found in audits], indent=2) + "\n")
    return Exit.OK if all(found.accounts.ok for found in audits) else Exit.FAILED


def audit_policy(log: Log, settings: Settings, policy: str) -> Audit:
    """The audit of one policy, with its trajectories where its settings say that they stand."""
    entry = settings.policies[policy]
    source = Source(entry.source.run, entry.source.policy or policy) if entry.source.run else None
    return audit(log, settings.run.name, policy, max_tokens=settings.kafka.max_tokens, source=source)


def facts(found: Audit) -> dict[str, Any]:
    """An audit as plain data."""
    accounts = found.accounts
    return {
        "run": found.run,
        "policy": found.policy,
        **{name: getattr(accounts, name) for name in FIGURES},
        "drops_by_reason": dict(accounts.drops_by_reason),
        "pending_by_reason": dict(accounts.pending_by_reason),
        "findings": list(accounts.findings),
        "steps": found.ledger.steps_done,
        "versions_published": found.versions_published,
        "versions_in_trained_tokens": len(found.trained_tokens),
        "max_staleness_seen": found.max_staleness_seen,
        "ok": accounts.ok,
    }


def table(audits: Iterable[Audit]) -> Table:
    """A column per policy, a row per figure."""
    audits = list(audits)
    view = Table(title="Accounts", title_justify="left")
    view.add_column("")
    for found in audits:
        view.add_column(f"{found.run}.{found.policy}", justify="right")
    for name in FIGURES:
        bad = name in ("unaccounted", "twice")
        cells = [(getattr(found.accounts, name), found) for found in audits]
        view.add_row(
            name.replace("_", " "),
            *[f"[red]{value}[/red]" if bad and value else str(value) for value, _ in cells],
        )
    reasons = sorted({reason for found in audits for reason in found.accounts.drops_by_reason})
    for reason in reasons:
        view.add_row(f"  dropped: {reason}", *[str(found.accounts.drops_by_reason.get(reason, 0)) for found in audits])
    waits = sorted({reason for found in audits for reason in found.accounts.pending_by_reason})
    for reason in waits:
        view.add_row(
            f"  pending: {reason}", *[str(found.accounts.pending_by_reason.get(reason, 0)) for found in audits]
        )
    view.add_row("books close", *["yes" if found.accounts.ok else "[red]no[/red]" for found in audits])
    return view
