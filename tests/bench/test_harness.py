"""The harness itself, on clocks of its own: turns, medians, ratios, the last line, the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, main
from bench.harness import Bench, Check, Side, Times, ratio


class Clock:
    """Time that passes only when a side says so; CPU time is half of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def side(self, name: str, *seconds: float) -> Side:
        """A side that takes these seconds, one after the other, again and again."""
        calls = 0

        def run() -> None:
            nonlocal calls
            self.order.append(name)
            self.now_s += seconds[calls % len(seconds)]
            calls += 1

        return Side(name, run)

    def bench(self, rounds: int = 5, max_s: float = 90.0) -> Bench:
        return Bench("x", rounds=rounds, max_s=max_s, wall=lambda: self.now_s, cpu=lambda: self.now_s / 2)


def test_sides_take_turns_and_each_is_first_in_some_round() -> None:
    clock = Clock()
    clock.bench().measure("work", [clock.side("a", 1.0), clock.side("b", 1.0), clock.side("c", 1.0)])
    turns = clock.order[3:]  # the first three are the calibration
    assert turns == list("abc" + "bca" + "cab" + "abc" + "bca")


def test_figures_are_medians_of_cpu_and_wall_time() -> None:
    clock = Clock()
    bench = clock.bench()
    times = bench.measure("work", [clock.side("a", 1.0, 1.0, 1.0, 9.0, 1.0, 1.0)])["a"]
    assert times.median_us("wall") == pytest.approx(1e6)
    assert times.median_us("cpu") == pytest.approx(0.5e6)
    assert len(times.cpu_s) == 5


def test_quick_sides_are_repeated_to_fill_a_round() -> None:
    clock = Clock()
    bench = clock.bench()
    times = bench.measure("work", [clock.side("a", 0.001)])["a"]
    assert times.median_us("wall") == pytest.approx(1000)
    assert len(clock.order) >= 5 * bench.round_s / 0.001


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    slow = Times((2.0, 20.0, 2.0, 2.0, 2.0), (1.0,) * 5)
    fast = Times((1.0, 10.0, 1.0, 4.0, 1.0), (0.5,) * 5)
    assert ratio(slow, fast) == 2.0
    assert ratio(slow, fast, "wall") == 2.0


@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (Check("x", 7.0, 7.0, "higher"), True),
        (Check("x", 6.9, 7.0, "higher"), False),
        (Check("x", 0.25, 0.25, "lower"), True),
        (Check("x", 0.26, 0.25, "lower"), False),
        (Check("x", float("nan"), 7.0, "higher"), False),
        (Check("x", float("nan"), 7.0, "lower"), False),
    ],
)
def test_a_check_is_met_at_its_target_and_never_by_nan(check: Check, ok: bool) -> None:
    assert check.ok is ok


def test_the_summary_is_one_line_of_json_with_the_agreed_keys() -> None:
    bench = Clock().bench()
    bench.check("ours vs theirs", 7.12345, 7.0)
    bench.hold_against("memcpy", 1.23456, "us")
    assert "\n" not in bench.summary()
    assert json.loads(bench.summary()) == {
        "name": "x",
        "checks": [{"what": "ours vs theirs", "value": 7.123, "target": 7.0, "better": "higher", "ok": True}],
        "limit": {"what": "memcpy", "value": 1.235, "unit": "us"},
        "seconds": 0.0,
    }


def test_a_run_fails_on_one_check_on_none_and_on_time() -> None:
    clock = Clock()
    bench = clock.bench(max_s=10.0)
    assert bench.exit_code() == 1  # nothing was checked
    bench.check("good", 2.0, 1.0)
    assert bench.exit_code() == 0
    clock.now_s = 11.0
    assert bench.exit_code() == 1
    clock.now_s = 0.0
    bench.check("bad", 0.5, 1.0)
    assert bench.exit_code() == 1
    assert "NOT MET" in bench.table()


def test_fewer_than_five_rounds_are_refused() -> None:
    with pytest.raises(AssertionError):
        Bench("x", rounds=4)


def test_an_unknown_bench_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codek"]) == 2
    assert main([]) == 2
    assert ", ".join(sorted(BENCHES)) in capsys.readouterr().err


def test_it_runs_as_a_module_from_the_tests_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "no-such-bench"], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 2 and "codec" in done.stderr
