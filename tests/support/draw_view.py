"""Draws the demo's live view as it stood at one step of a finished run, from the run's log, as an SVG picture.

    cd tests && ../.venv/bin/python -m support.draw_view ../demo/NAME.toml ../infra/docs/pictures/view.svg --step 100

The log holds the append time of every record, so any moment of a run can be shown again. The servers must be up.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from infra import wiring
from infra.config import load
from infra.demo.progress import PolicyProgress
from infra.demo.view import picture
from infra.log import Envelope, Log, Place
from infra.ownership import read_all, read_record
from infra.settings import Settings
from schemas.names import control_topic, topic

WIDTH = 120


def progress_at(log: Log, settings: Settings, policy: str, step: int) -> tuple[PolicyProgress, float]:
    """What the view knew when `step` steps were done, and seconds since the run's first record."""
    table = settings.policies[policy]
    progress = PolicyProgress(policy, table.train.stop_at, table.train.max_staleness)
    kinds = {topic(settings.run.name, policy, kind): kind for kind in ("steps", "weights")}
    kinds[control_topic(settings.run.name)] = "control"
    found: list[Envelope] = []
    for name in kinds:
        found += [e for partition, b in log.bounds(name).items() for e in read_all(log, Place(name, partition), b)]
    found.sort(key=lambda envelope: (envelope.time_ms, envelope.topic, envelope.offset))
    elapsed_s = 0.0
    for envelope in found:
        elapsed_s = (envelope.time_ms - found[0].time_ms) / 1000
        kind, record = kinds[envelope.topic], read_record(envelope)
        progress.take(kind, envelope.offset, record, envelope.time_ms, elapsed_s)
        if progress.ledger.steps_done >= step:
            break
    return progress, elapsed_s


def draw(log: Log, settings: Settings, step: int) -> str:
    """The view as an SVG picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    views = {policy: progress_at(log, settings, policy, step) for policy in settings.policies}
    engine = next(iter(settings.policies.values())).rollout.engine
    title = f"OffsetRL demo · run {settings.run.name} · engine {engine}"
    elapsed_s = max(elapsed for _, elapsed in views.values())
    console.print(picture(title, elapsed_s, {name: found for name, (found, _) in views.items()}, {}))
    drawn = console.export_svg(title="offsetrl demo", font_aspect_ratio=0.61)
    # The fonts that rich links to lie elsewhere; a picture must stand alone.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


def main() -> None:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int, default=100)
    asked = parser.parse_args()
    settings = load(asked.config).settings
    log = wiring.open_log(settings, client_id="draw-view")
    try:
        asked.picture.write_text(draw(log, settings, asked.step), encoding="utf-8")
    finally:
        log.close()


if __name__ == "__main__":
    main()
