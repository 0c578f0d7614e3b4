"""The benches still run and still say what is so: each once at a tiny size, and their helpers on numbers known by heart."""

from __future__ import annotations

import doctest
import importlib
import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench import (
    async_ratio,
    consume,
    exactly_once,
    groups,
    hand_written,
    path,
    produce,
    slow_env,
    spot,
    staleness,
    swap,
)
from bench.__main__ import BENCHES
from bench.broker import Broker
from bench.harness import Bench
from consumers.advantages.grpo import grpo
from consumers.group_rewards import GroupRewards
from producers.engines.scripted_engine import ScriptedEngine
from schemas.codec import decode, encode
from schemas.records import Outcome, Trajectory, Version
from schemas.rules.partition import PartitionState
from schemas.wire import pack_segments, pack_versions
from support import paced, paced_run, paced_tools, paired
from support.paced_run import Load, Ran
from support.samples import trajectory
from support.servers import S3Endpoint, session_state
from support.spot_run import Fleet

KB = 1024
DOCTESTED = [
    async_ratio, consume, exactly_once, groups, hand_written, paced, paced_run, paced_tools, paired, path, produce,
]  # fmt: skip
PACED = Load(slots=8, workers=1, group_size=2, batch_groups=4, mean_s=0.05, step_s=0.05, run_s=2.5, warm_s=0.5)
TINY = {"4 KB": (4 * KB, 8), "1 MB": (1024 * KB, 1)}


@pytest.fixture
def found(bootstrap: str) -> Broker:
    return Broker(bootstrap, session_state())


@pytest.fixture
def bench() -> Bench:
    return Bench("tiny", rounds=5, round_s=0.0001)


def _whats(bench: Bench) -> set[str]:
    return {check["what"] for check in json.loads(bench.summary())["checks"]}


def _values(bench: Bench) -> dict[str, float]:
    return {check.what: check.value for check in bench.checks}


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_bench_has_a_run_and_a_card(name: str) -> None:
    module = importlib.import_module(BENCHES[name])
    assert callable(module.run)
    assert (module.__doc__ or "").startswith(f"Bench `{name}`")


@pytest.mark.parametrize("module", DOCTESTED)
def test_worked_numbers_are_true(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.broker
def test_produce_runs(found: Broker, bench: Bench) -> None:
    produce.compare(bench, found, TINY)
    assert _whats(bench) == {"bare client"} and _values(bench)["bare client"] > 0
    assert "defaults" in bench.table() and bench.limit is not None


@pytest.mark.broker
def test_consume_runs(found: Broker, bench: Bench) -> None:
    consume.compare(bench, found, TINY)
    assert _whats(bench) == {"bare client"} and _values(bench)["bare client"] > 0


@pytest.mark.broker
def test_path_runs_and_both_loops_come_to_the_same_numbers(found: Broker, bench: Bench) -> None:
    path.compare(bench, found, {16: 8})  # raises where members or advantages differ
    assert _whats(bench) == {"hand-written"} and bench.limit is not None


@pytest.mark.broker
def test_exactly_once_survives_a_kill_and_counts(found: Broker, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once, "NUM_KILLS", 1)
    exactly_once.compare(bench, found, num_groups=64, rounds=1, life_s=(0.15, 0.3))
    assert _whats(bench) == {"at-least-once", "lost", "doubled"}
    assert (_values(bench)["lost"], _values(bench)["doubled"]) == (0, 0)


def test_groups_hold_little_and_stay_flat(bench: Bench) -> None:
    groups.compare(bench, {(500, 0.01): 4_000})
    assert bench.exit_code() == 0, bench.table()
    assert _whats(bench) == {"memory slope", "lists"}


def test_groups_that_nobody_closes_are_seen_as_a_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionState, "close", lambda self, group, *, offset, time_ms: None)
    flow = groups.feed(3_000, 500, 0.01, bytes(4000))
    assert flow.num_closed < 3_000
    assert flow.slope() > groups.SLOPE_TARGET


def test_async_runs_and_the_barrier_is_one(bench: Bench) -> None:
    async_ratio.compare(bench, PACED, {3.2: (0, 2)})
    assert _whats(bench) == {"of bound", "barrier 3.2"} and bench.limit is not None
    assert 0 < _values(bench)["of bound"] < 1 and _values(bench)["barrier 3.2"] > 0
    assert "barrier loop" in bench.table()


def test_staleness_runs_within_its_bounds(bench: Bench) -> None:
    staleness.compare(bench, PACED, (0, 2))
    assert _whats(bench) == {"bound kept", "stale drops", "ungated"}
    assert _values(bench)["bound kept"] == 0 and 0 <= _values(bench)["stale drops"] < 1


def _ran(ages: tuple[int, ...], **changes: Any) -> Ran:
    times_s = tuple(float(step) for step in range(len(ages)))
    given: dict[str, Any] = dict(
        done_s=times_s, groups=((0,),) * len(ages), ages=ages, kept=10, stale=0, statuses=Counter(), warm_s=0, cpu_s=1.0
    )
    return Ran(**given | changes)


def test_a_token_beyond_the_bound_is_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {2: _ran((0, 1, 3, 3)), staleness.UNGATED: _ran((0, 1, 2, 9)), 4: _ran((0, 1, 4, 4), stale=1)}
    monkeypatch.setattr(staleness, "side_by_side", lambda loads: runs)
    staleness.compare(bench, PACED, (2, 4))
    assert _values(bench) == {"bound kept": 2, "stale drops": 0.1, "ungated": 1.0}
    assert bench.exit_code() == 1


def test_slow_env_runs_and_gives_hung_tools_up(bench: Bench) -> None:
    tools = {"turns": 2, "call_s": 0.02, "slow": 0.05, "slower": 5.0, "hung": 0.02}
    tables = {**slow_env.LOAD.tables, "rollout": {"tool_timeout_s": 0.3}, "process": {"min_members": 2}}
    tables["task"] = {**tables["task"], "settings": tools}
    slow_env.compare(bench, replace(PACED, group_size=4, tables=tables))
    assert _whats(bench) == {"hung tools", "idle"}
    assert "timeout" in bench.table()


def test_swap_runs_and_counts(bench: Bench, tmp_path: Path) -> None:
    save_file({"w": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    engine = ScriptedEngine(Version(1, 0), vocab_size=97, max_model_len=2 * swap.MAX_TOKENS, stop_ids=(1,))
    swap.compare(bench, engine, [tmp_path], 5)
    assert _whats(bench) == {"drain", "lost"} and _values(bench)["lost"] == 0
    assert _values(bench)["drain"] > 0


def test_swap_sees_a_request_that_is_lost(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    load = ScriptedEngine.load

    def forgetful(self: ScriptedEngine, folder: Path, version: Version) -> None:
        if self._running:
            self.cancel(next(iter(self._running)))
        load(self, folder, version)

    monkeypatch.setattr(ScriptedEngine, "load", forgetful)
    engine = ScriptedEngine(Version(1, 0), vocab_size=97, max_model_len=2 * swap.MAX_TOKENS, stop_ids=(1,))
    swap.compare(bench, engine, [tmp_path], 5)
    assert _values(bench)["lost"] == 5


@pytest.mark.broker
@pytest.mark.s3
def test_spot_kills_a_worker_and_loses_nothing(found: Broker, s3_endpoint: S3Endpoint) -> None:
    s3 = {
        "endpoint_url": s3_endpoint.url, "bucket": s3_endpoint.bucket,
        "access_key": s3_endpoint.access_key, "secret_key": s3_endpoint.secret_key,
    }  # fmt: skip
    servers = {"kafka": {"bootstrap_servers": found.bootstrap}, "s3": s3}
    load = replace(spot.LOAD, slots=4, workers=2, group_size=2, batch_groups=2, mean_s=0.3)
    fleet = Fleet.start("spot-tiny", load, 0.5, **servers)
    try:
        spot.wait_begun({"tiny": fleet})
        spot.tend({"tiny": fleet}, time.time() + 0.7)
        fleet.spare()
        asked_by_s, start_s = time.time(), fleet.workers[0].hired_s
        assert fleet.num_killed == 1 and len(fleet.workers) == 3
        assert 0 < fleet.alive_s(start_s, asked_by_s) < 2 * 2 * (asked_by_s - start_s), (
            "two slots each, never three workers"
        )
        while sum(fleet.missing(asked_by_s)):
            spot.tend({"tiny": fleet}, time.time() + 0.2)
        assert fleet.useful_s(start_s, time.time()) > 0 and fleet.unaccounted() == 0
    finally:
        fleet.close()


class _Fleet:
    """What `spot` asks of a run."""

    has_begun, num_killed = True, 0

    def __init__(self, useful_s: float, lost: int, unaccounted: int) -> None:
        self._useful_s, self._lost, self._unaccounted = useful_s, lost, unaccounted

    def nothing(self) -> None: ...

    begin = tend = spare = close = nothing

    def alive_s(self, start_s: float, end_s: float) -> float:
        return 100.0

    def start_s(self) -> float:
        return 1.0

    def useful_s(self, start_s: float, end_s: float) -> float:
        return self._useful_s

    def missing(self, until_s: float) -> tuple[int, int]:
        return self._lost, 0

    def unaccounted(self) -> int:
        return self._unaccounted


@pytest.mark.parametrize(("going_on", "met"), [(_Fleet(92, 0, 0), True), (_Fleet(80, 3, 1), False)])
def test_spot_judges(bench: Bench, monkeypatch: pytest.MonkeyPatch, going_on: _Fleet, met: bool) -> None:
    runs = {"spot-0": _Fleet(100, 0, 0), "spot-1": going_on, "spot-2": _Fleet(70, 40, 0)}
    monkeypatch.setattr(Fleet, "start", lambda run, load, every_s, **servers: runs[run])
    spot.compare(bench, spot.LOAD, {}, kill_every_s=1.0, warm_s=0.0, run_s=0.0, settle_s=0.0)
    assert _whats(bench) == {"alive", "restart", "lost"}
    assert (bench.exit_code() == 0) is met
    assert _values(bench)["lost"] == (0 if met else 4)


def test_a_stretch_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume, "PATIENCE_S", -1.0)
    with pytest.raises(AssertionError, match="0 of 3 records came"):
        consume.Stretch(lambda: (0, 0), 3)()


def test_the_loopback_is_measured() -> None:
    assert consume.loopback_mb_per_s(1) > 0


def test_batches_are_mixed_groups_with_some_of_equal_rewards() -> None:
    batch = path.make_batch("r", 16, 4, 8)
    assert [record.group for record in batch[:4]] == [f"g{n:08d}" for n in range(8, 12)]
    rewards = {number: {r.reward for r in batch if r.item == 1000 + number} for number in range(8, 12)}
    assert [len(found) > 1 for found in rewards.values()] == [False, True, True, True]


def test_the_hand_written_codec_writes_our_bytes() -> None:
    record = trajectory()
    datum = hand_written.plain(record)
    datum["segments"] = pack_segments(record.segments)
    datum["versions"] = pack_versions(record.versions)
    data = hand_written.encode(hand_written.TRAJECTORY, hand_written.HEADS[Trajectory], datum)
    assert data == encode(record)
    assert hand_written.decode(hand_written.TRAJECTORY, data)["tokens"] == record.tokens


def test_the_hand_written_outcome_is_one_of_ours() -> None:
    members = [trajectory(group_size=2, index=index, reward=reward) for index, reward in enumerate((1.0, 0.25))]
    pairs = [(n, hand_written.decode(hand_written.TRAJECTORY, encode(record))) for n, record in enumerate(members)]
    datum = hand_written.outcome_of(pairs, 9, 5)
    outcome = decode(hand_written.encode(hand_written.OUTCOME, hand_written.HEADS[Outcome], datum))
    assert isinstance(outcome, Outcome) and outcome.kept and outcome.oldest_version == 6
    wanted = grpo(GroupRewards.of([1.0, 0.25])).tolist()
    assert all(math.isclose(a.advantage, b) for a, b in zip(outcome.members, wanted, strict=True))
    assert [member.num_sampled for member in outcome.members] == [3, 3]


def test_the_page_names_every_bench() -> None:
    page = (Path(__file__).parents[2] / "infra/docs/benches.md").read_text("utf-8")
    assert [name for name in BENCHES if f"`{name}`" not in page] == []
