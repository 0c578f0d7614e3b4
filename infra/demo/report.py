"""The demo's report: one HTML file with everything in it, no script and no link to anywhere else."""

from __future__ import annotations

import html
import io
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import matplotlib
from markupsafe import Markup

from infra.audit import Audit
from infra.demo.progress import PolicyProgress
from infra.demo.transcripts import Transcript, sample

if TYPE_CHECKING:
    from infra.demo.run import Run
    from infra.demo.watch import Watch

matplotlib.use("svg")
_COLOURS = ("#2f6f9f", "#c8553d", "#588157", "#8e6c8a")
_NUM_TRANSCRIPTS = 12


def write(path: Path, *, demo: Run, watch: Watch, result: Mapping[str, Any]) -> None:
    """Write the report."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infra.demo", "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    sections = [
        {
            "policy": policy,
            "figures": result["policies"][policy],
            "checks": result["checks"][policy],
            "plots": plots(watch.policies[policy], found),
            "transcripts": [
                _markup(entry) for entry in sample(found, demo.settings.policies[policy].model, _NUM_TRANSCRIPTS)
            ],
        }
        for policy, found in demo.audits.items()
    ]
    text = environment.get_template("report.html").render(
        result=result, sections=sections, settings=demo.config.read_text(), made=time.strftime("%Y-%m-%d %H:%M:%S")
    )
    path.write_text(text)


def plots(progress: PolicyProgress, found: Audit) -> list[str]:
    """The plots of a policy, as SVG text."""
    return [
        _plot("Mean reward of each step's batch", "step", "reward", lambda axes: _reward(axes, progress)),
        _plot(
            "Staleness of each step's batch (greatest age)", "step", "versions", lambda axes: _staleness(axes, progress)
        ),
        _plot("Tokens per second", "seconds", "tokens/s", lambda axes: _tokens(axes, progress)),
        _plot("Versions: trained, and in use by workers", "seconds", "version", lambda axes: _versions(axes, progress)),
        _plot(
            "Trained tokens by the version that made them", "version", "tokens", lambda axes: _by_version(axes, found)
        ),
        _plot("Left out, trajectories by reason", "", "trajectories", lambda axes: _drops(axes, found)),
    ]


def _plot(title: str, x: str, y: str, draw: Any) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.0), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _reward(axes: Any, progress: PolicyProgress) -> None:
    rewards = progress.rewards
    axes.plot(range(1, len(rewards) + 1), rewards, color=_COLOURS[0], linewidth=0.8, alpha=0.5)
    axes.plot(range(1, len(rewards) + 1), _smooth(rewards), color=_COLOURS[0], linewidth=1.8)
    axes.set_ylim(0, max(1.0, *rewards) if rewards else 1.0)


def _staleness(axes: Any, progress: PolicyProgress) -> None:
    ages = progress.ages
    axes.step(range(1, len(ages) + 1), ages, color=_COLOURS[1], linewidth=1.2, where="mid")
    axes.axhline(progress.max_staleness, color="#999", linewidth=0.8, linestyle="--")
    axes.set_ylim(-0.2, progress.max_staleness + 0.6)


def _tokens(axes: Any, progress: PolicyProgress) -> None:
    axes.plot([at for at, _ in progress.tokens], [rate for _, rate in progress.tokens], color=_COLOURS[2])
    axes.set_ylim(bottom=0)


def _versions(axes: Any, progress: PolicyProgress) -> None:
    axes.plot(progress.times_s, range(1, len(progress.times_s) + 1), color=_COLOURS[0], label="trained")
    names = sorted({name for _, name, _ in progress.worker_versions})
    for number, name in enumerate(names, 1):
        points = [(at, version) for at, worker, version in progress.worker_versions if worker == name]
        axes.plot(*zip(*points, strict=True), color=_COLOURS[number % len(_COLOURS)], label=name, linewidth=1)
    if progress.times_s or names:
        axes.legend(fontsize=7, frameon=False)


def _by_version(axes: Any, found: Audit) -> None:
    counts: dict[int, int] = {}
    for (_, version), count in found.trained_tokens.items():
        counts[version] = counts.get(version, 0) + count
    axes.bar(list(counts), list(counts.values()), color=_COLOURS[0], width=0.9)


def _drops(axes: Any, found: Audit) -> None:
    reasons = dict(sorted(found.accounts.drops_by_reason.items()))
    reasons |= {name: getattr(found.accounts, name) for name in ("late", "superseded") if getattr(found.accounts, name)}
    axes.bar(list(reasons) or ["none"], list(reasons.values()) or [0], color=_COLOURS[3], width=0.6)


def _smooth(values: Sequence[float], width: int = 9) -> list[float]:
    """Running mean over the last `width` values."""
    window = [[v for v in values[max(0, i - width + 1) : i + 1] if not math.isnan(v)] for i in range(len(values))]
    return [sum(part) / len(part) if part else math.nan for part in window]


def _markup(entry: Transcript) -> dict[str, Any]:
    """A transcript as HTML, each token coloured by the version that made it."""
    spans = []
    for piece in entry.pieces:
        text = html.escape(piece.text)
        if piece.version is None:
            spans.append(f'<span class="given">{text}</span>')
        else:
            hue = 25 + 300 * piece.version / max(entry.newest, 1)
            title = f"version {piece.version}, log-prob {piece.logprob:.2f}"
            spans.append(f'<span style="background:hsl({hue:.0f} 70% 85%)" title="{title}">{text}</span>')
    return {"step": entry.step, "reward": entry.reward, "advantage": entry.advantage, "versions": entry.versions,
            "body": Markup("".join(spans))}  # fmt: skip
