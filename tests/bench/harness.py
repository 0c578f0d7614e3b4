"""Benchmarks that compare: sides run in turns within one process, medians over rounds, CPU time beside wall time.

A bench is a function that takes a `Bench`, lets it `measure` sides that do the same work in different ways, and `check`s
ratios between them. Absolute figures of a shared machine mean little; a ratio of two sides of the same round means much.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Better = Literal["higher", "lower"]
Clock = Literal["cpu", "wall"]


@dataclass(frozen=True, slots=True)
class Side:
    """One way of doing the work: `run` does it once. `size_bytes` is what it puts on the wire, where that is of interest."""

    name: str
    run: Callable[[], object]
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per call of one side, round by round: CPU time of the process, and wall time."""

    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]

    def median_us(self, clock: Clock = "cpu") -> float:
        """Median over the rounds, in microseconds."""
        return 1e6 * statistics.median(self.cpu_s if clock == "cpu" else self.wall_s)

    def spread(self) -> float:
        """Half the distance between the quartiles of CPU time, as a share of the median."""
        low, middle, high = statistics.quantiles(self.cpu_s, n=4)
        return (high - low) / 2 / middle if middle else 0.0


def ratio(slow: Times, fast: Times, clock: Clock = "cpu") -> float:
    """How many times longer `slow` takes: the median of the rounds' own ratios, so that drift of the machine cancels.

    >>> ratio(Times((4.0, 8.0, 4.0), (0, 0, 0)), Times((1.0, 2.0, 4.0), (0, 0, 0)))
    4.0
    """
    pairs = zip(slow.cpu_s, fast.cpu_s, strict=True) if clock == "cpu" else zip(slow.wall_s, fast.wall_s, strict=True)
    return statistics.median(a / b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Check:
    """A figure held against a target."""

    what: str
    value: float
    target: float
    better: Better

    @property
    def ok(self) -> bool:
        """Whether the target is met; NaN never is."""
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


@dataclass(slots=True)
class Bench:
    """One run of one bench: measurements, checks, and what they are held against.

    The clocks are arguments so that the harness itself can be tested without waiting.
    """

    name: str
    rounds: int = 9
    round_s: float = 0.02
    """Least time that one side works in one round; calls are repeated to fill it."""
    max_s: float = 90.0
    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    checks: list[Check] = field(default_factory=list)
    limit: dict[str, Any] | None = None
    lines: list[str] = field(default_factory=list)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        assert self.rounds >= 5, "fewer than 5 rounds say nothing"
        self.started_s = self.wall()

    def measure(self, title: str, sides: Sequence[Side]) -> dict[str, Times]:
        """Run the sides in turns, another one first in each round; adds a block to the table."""
        assert len({side.name for side in sides}) == len(sides), "two sides of one name"
        calls = [self._calls(side) for side in sides]
        cpu: list[list[float]] = [[] for _ in sides]
        wall: list[list[float]] = [[] for _ in sides]
        for turn in range(self.rounds):
            for step in range(len(sides)):
                which = (turn + step) % len(sides)
                spent = self._round(sides[which], calls[which])
                cpu[which].append(spent[0])
                wall[which].append(spent[1])
        times = {side.name: Times(tuple(cpu[i]), tuple(wall[i])) for i, side in enumerate(sides)}
        self._add_rows(title, sides, times)
        return times

    def check(self, what: str, value: float, target: float, better: Better = "higher") -> None:
        """Hold a figure against its target."""
        self.checks.append(Check(what, value, target, better))

    def hold_against(self, what: str, value: float, unit: str) -> None:
        """Name the physical limit that was measured in the same run."""
        self.limit = {"what": what, "value": _figures(value), "unit": unit}

    def note(self, line: str) -> None:
        """Add a line of words to the table."""
        self.lines.append(line)

    @property
    def seconds(self) -> float:
        """Since this bench began."""
        return self.wall() - self.started_s

    def table(self) -> str:
        """What was measured and checked, for people."""
        rows = [*self.lines, ""]
        for check in self.checks:
            sign = ">=" if check.better == "higher" else "<="
            verdict = "ok" if check.ok else "NOT MET"
            rows.append(f"{check.what:<32} {check.value:10.4g}  wanted {sign} {check.target:<8g} {verdict}")
        if self.limit:
            rows.append(f"held against: {self.limit['what']}, {self.limit['value']:g} {self.limit['unit']}")
        return "\n".join(rows)

    def summary(self) -> str:
        """The same for machines: one line of JSON."""
        checks = [
            {"what": c.what, "value": _figures(c.value), "target": c.target, "better": c.better, "ok": c.ok}
            for c in self.checks
        ]
        return json.dumps(
            {"name": self.name, "checks": checks, "limit": self.limit, "seconds": round(self.seconds, 1)},
            allow_nan=False,
        )

    def exit_code(self) -> int:
        """0 if there are checks, all are met, and the run stayed within its time."""
        return 0 if self.checks and all(check.ok for check in self.checks) and self.seconds <= self.max_s else 1

    def _calls(self, side: Side) -> int:
        """How many calls fill a round; also warms the side up."""
        calls = 1
        while True:
            start = self.wall()
            for _ in range(calls):
                side.run()
            spent = self.wall() - start
            if spent >= self.round_s / 2:
                return max(1, round(calls * self.round_s / spent))
            calls *= 2

    def _round(self, side: Side, calls: int) -> tuple[float, float]:
        """(CPU, wall) seconds per call. Garbage of the other sides is collected before, none in between.

        A fifth of the calls come first and do not count: after another side's turn every cache is cold.
        """
        gc.collect()
        gc.disable()
        run = side.run
        try:
            for _ in range(calls // 5):
                run()
            cpu, wall = self.cpu(), self.wall()
            for _ in range(calls):
                run()
            return (self.cpu() - cpu) / calls, (self.wall() - wall) / calls
        finally:
            gc.enable()

    def _add_rows(self, title: str, sides: Sequence[Side], times: dict[str, Times]) -> None:
        best = min(one.median_us() for one in times.values())
        self.lines += ["", f"{title:<36} {'CPU us':>10} {'wall us':>10} {'spread':>7} {'to best':>8} {'bytes':>9}"]
        for side in sides:
            one = times[side.name]
            size = "" if side.size_bytes is None else f"{side.size_bytes:,}"
            to_best = one.median_us() / best if best else 0.0
            self.lines.append(
                f"  {side.name:<34} {one.median_us():10.2f} {one.median_us('wall'):10.2f} "
                f"{one.spread():6.0%} {to_best:7.1f}x {size:>9}"
            )


def _figures(value: float) -> float:
    """Four figures: no more is known."""
    return float(f"{value:.4g}")
