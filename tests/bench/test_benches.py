"""The benches still run and still say what is so: each once at a tiny size, and their helpers on numbers known by heart."""

from __future__ import annotations

import doctest
import importlib
import json
import math
from pathlib import Path

import pytest

from bench import consume, exactly_once, groups, hand_written, path, produce
from bench.__main__ import BENCHES
from bench.broker import Broker
from bench.harness import Bench
from consumers.advantages.grpo import grpo
from consumers.group_rewards import GroupRewards
from schemas.codec import decode, encode
from schemas.records import Outcome, Trajectory
from schemas.rules.partition import PartitionState
from schemas.wire import pack_segments, pack_versions
from support.samples import trajectory
from support.servers import session_state

KB = 1024
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


@pytest.mark.parametrize("module", [consume, exactly_once, groups, hand_written, path, produce])
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
