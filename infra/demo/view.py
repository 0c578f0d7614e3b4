"""The demo's terminal view: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.demo.progress import ROLES, PolicyProgress

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LINE_EVERY_S = 5.0
CURVE_WIDTH = 64
CURVE_HEIGHT = 6


class View:
    """Shows progress; `say` adds a line that stays."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._title = title
        self._phase = "starting"
        self._started = time.monotonic()
        self._lined = 0.0
        self._live: Live | None = None
        self._stack = ExitStack()

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._stack.enter_context(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def say(self, text: str, style: str = "") -> None:
        """A line that stays on the screen."""
        self._phase = text
        self._console.print(
            f"{time.monotonic() - self._started:6.1f} s  {text}",
            style=style,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def show(self, policies: Mapping[str, PolicyProgress], restarts: Mapping[str, int]) -> None:
        """Draw what is known now; on a terminal in place, elsewhere a line every few seconds."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(picture(self._title, now - self._started, policies, restarts))
        elif now - self._lined > _LINE_EVERY_S:
            self._lined = now
            for progress in policies.values():
                self._console.print(
                    f"{now - self._started:6.1f} s  {line(progress)}", markup=False, highlight=False, soft_wrap=True
                )


def line(progress: PolicyProgress) -> str:
    """One policy in one line."""
    rewards, ages = progress.rewards, progress.ages
    parts = [
        f"{progress.policy}: step {progress.course}",
        f"reward {_mean(rewards[-5:]):.3f}",
        f"age {ages[-1] if ages else '-'} of at most {progress.max_staleness}",
        f"{progress.tokens_per_s():.0f} tokens/s",
        f"published {max(progress.published, default='-')}",
        f"in use {', '.join(str(b.version) for b in progress.of_role('rollout')) or '-'}",
        f"lag {_lag(progress):.0f}",
        f"dropped {_drops(progress)}",
    ]
    return " · ".join(parts if rewards else [*parts, f"waits for {progress.waiting_for()}"])


def picture(
    title: str, elapsed_s: float, policies: Mapping[str, PolicyProgress], restarts: Mapping[str, int]
) -> RenderableType:
    """The live view: a curve, figures and roles of each policy."""
    rows: list[RenderableType] = [Text(f"{title} · {elapsed_s:.0f} s", style="bold")]
    rows.extend(_panel(progress, restarts) for progress in policies.values())
    return Group(*rows)


def _panel(progress: PolicyProgress, restarts: Mapping[str, int]) -> Panel:
    rewards, ages = progress.rewards, progress.ages
    body = Table.grid(padding=(0, 2))
    body.add_row(Text("\n".join(curve(rewards)), style="green"), _figures(progress, rewards, ages))
    return Panel(Group(body, _roles(progress, restarts)), title=progress.policy, title_align="left")


def _figures(progress: PolicyProgress, rewards: list[float], ages: list[int]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row("step", progress.course)
    table.add_row("reward", f"{_mean(rewards[:5]):.3f} → {_mean(rewards[-5:]):.3f}" if rewards else "-")
    table.add_row(
        "staleness",
        f"{ages[-1] if ages else '-'} (greatest {max(ages, default='-')}, allowed {progress.max_staleness})",
    )
    table.add_row("tokens/s", f"{progress.tokens_per_s():.0f}")
    table.add_row("published", f"{len(progress.published)} versions, newest {max(progress.published, default='-')}")
    table.add_row("lag", f"{_lag(progress):.0f} trajectories")
    table.add_row("dropped", _drops(progress))
    if not rewards:
        table.add_row("waits for", progress.waiting_for())
    return table


def _roles(progress: PolicyProgress, restarts: Mapping[str, int]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("role", "name", "state", "version", "detail", "restarts"):
        table.add_column(column)
    for role in ROLES:
        for beat in progress.of_role(role):
            count = restarts.get(f"{role}-{progress.policy}", restarts.get(beat.name, 0))
            version = str(beat.version) if beat.version >= 0 else "-"
            table.add_row(
                role, beat.name, beat.state.value, version, _detail(role, beat.metrics, beat.running), str(count)
            )
    return table


def _detail(role: str, metrics: Mapping[str, float], running: int) -> str:
    if role == "dispatch":
        return f"{running} groups running, {metrics.get('backlog_groups', 0):.0f} kept and not planned"
    if role == "rollout":
        return f"{running} episodes running, {metrics.get('waiting_requests', 0):.0f} wait"
    if role == "eval":
        return f"{metrics.get('evaluations', 0):.0f} versions measured"
    if role == "process":
        return f"lag {metrics.get('lag', 0):.0f}"
    return f"{metrics.get('waiting_groups', 0):.0f} groups wait, a batch is {metrics.get('wanted_groups', 0):.0f}"


def curve(values: Iterable[float], width: int = CURVE_WIDTH, height: int = CURVE_HEIGHT) -> list[str]:
    """A bar chart of values between 0 and 1, newest at the right, in block characters.

    >>> curve([0.0, 0.5, 1.0], width=3, height=2)
    ['1.0 │  █', '0.0 │ ██']
    """
    shown = _squeeze([value for value in values if not math.isnan(value)], width)
    rows = []
    for row in range(height - 1, -1, -1):
        cells = [_BLOCKS[round(8 * min(1.0, max(0.0, value * height - row)))] for value in shown]
        label = f"{(row + 1) / height:.1f}" if row == height - 1 else ("0.0" if row == 0 else "   ")
        rows.append(f"{label} │{''.join(cells)}".rstrip() if shown else f"{label} │")
    return rows


def _squeeze(values: list[float], width: int) -> list[float]:
    """At most `width` values: means of consecutive ones."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _lag(progress: PolicyProgress) -> float:
    return sum(beat.metrics.get("lag", 0.0) for beat in progress.of_role("process"))


def _drops(progress: PolicyProgress) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(progress.drops.items())) or "none"
