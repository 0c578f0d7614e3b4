"""Drops: every fate is counted once, and a bias by length or difficulty is seen when it is there, and only then."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra import preflight, wiring
from infra.config import load
from infra.drops import DEAD, MIN_GROUPS, TRAINED, WAITING, Drops, Seen, compare, summary
from infra.drops_command import command, drops_of, sentences, told
from infra.memory_log import MemoryLog
from infra.provision import topic_specs
from infra.settings import Settings
from schemas.codec import decode, encode
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import Address, Outcome, PlanDrop, Role, Segment, Status, VersionRun
from support.processor_scenes import GROUP_SIZE, SAMPLES, SOURCE, Clock, records, work_off
from support.samples import claim, close, plan, result, trajectory


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "offsetrl.toml"
    path.write_text('[run]\nname = "demo"\npartitions = 1\n[policies.main]\nmodel = "model"\n')
    return load(path, [], {}).settings


def _member(index: int, group: str, sampled: int, **changes: object) -> bytes:
    fields = {
        "partition": 0, "group_size": GROUP_SIZE, "first_request_time_ms": 1000, "lifetime_ms": 100, "reward": 0.0,
        "tokens": pack_ints([1] * (sampled + 1)), "loss_mask": pack_bits([False] + [True] * sampled),
        "logprobs": pack_floats([-1.0] * sampled), "versions": (VersionRun(1, 0, sampled),),
        "segments": (Segment(Role.PROMPT, 1), Segment(Role.SAMPLED, sampled)),
    }  # fmt: skip
    return encode(trajectory(group=group, index=index, **{**fields, **changes}))


def _write(log: MemoryLog, topic: str, *values: bytes) -> None:
    writer = log.writer()
    for value in values:
        writer.send(topic, 0, value)
    writer.close()


def _scene(settings: Settings, num_groups: int, *, slow_are_long: bool) -> MemoryLog:
    """Groups of three whose third member comes too late; it is ten times as long, or just as long as the others."""
    clock, rng = Clock(), random.Random(5)
    log = MemoryLog(clock_ms=clock)
    log.create(topic_specs(settings))
    lengths = [[rng.randint(8, 12)] * GROUP_SIZE for _ in range(num_groups)]
    clock.now_ms = 1050
    for n, sampled in enumerate(lengths):
        group = f"g{n}"
        _write(log, SOURCE, _member(0, group, sampled[0]), _member(1, group, sampled[1], reward=1.0))
        _write(log, SOURCE, encode(close(group=group, partition=0)))
    _write(log, SOURCE, b"poison", _member(0, "odd", 4, status=Status.TIMEOUT, reward=None), _member(1, "odd", 5))
    _write(log, SOURCE, encode(close(group="odd", partition=0)), _member(0, "g0", 9, attempt=1))
    clock.now_ms = 1101
    for n, sampled in enumerate(lengths):
        _write(log, SOURCE, _member(2, f"g{n}", sampled[2] * (10 if slow_are_long else 1)))
    recipe = make_recipe(group_filters=[], min_members=2, group_size=GROUP_SIZE)
    route = Route(run="demo", policy="main", source_run="demo", source_policy="main")
    processor = Partitions(log, route, recipe, patience_s=5.0, commit_every_s=0.0, max_tokens=10_000)
    work_off(processor, log)
    _train(log)
    return log


def _train(log: MemoryLog) -> None:
    """One step: the first kept group is set aside as too old, the second waits, all others are trained."""
    kept = [
        (envelope.offset, outcome)
        for envelope in records(log, SAMPLES)
        if isinstance(outcome := decode(envelope.value), Outcome) and outcome.kept
    ]
    addresses = [Address(0, offset, outcome.closing_offset, 2) for offset, outcome in kept]
    owner = {"epoch": 1, "nonce": "n"}
    made = plan(step=0, samples=tuple(addresses[2:]), drops=(PlanDrop(*addresses[0], "stale", 9),), **owner)
    done = result(step=0, version=1, **owner)
    _write(log, "demo.main.steps", encode(claim(**owner)), encode(made), encode(done))


def _found(log: MemoryLog, settings: Settings) -> Drops:
    return drops_of(log, settings, "main", solved=1.0)


def test_every_fate_is_counted_once(settings: Settings) -> None:
    found = _found(_scene(settings, 40, slow_are_long=True), settings)
    counts = {side.fate: side.trajectories for side in found.reasons}
    assert counts == {"late": 40, "stale": 2, "incomplete": 1, "timeout": 1, "superseded": 1, DEAD: 1}
    assert (found.trained.trajectories, found.left_out.trajectories, found.settled) == (76, 45, 121)
    assert found.missing_members == 41  # a member short in each group: the late ones too had not come when it closed
    assert found.tasks == (("sort-digits", 76, 44),)  # nobody knows the task of what could not be read
    late = next(side for side in found.reasons if side.fate == "late")
    assert (late.groups, late.mean_group_reward, late.mean_group_solved) == (40, 0.5, 0.5)


def test_a_bias_by_length_is_seen_and_said(settings: Settings) -> None:
    found = _found(_scene(settings, 40, slow_are_long=True), settings)
    late = next(side for side in found.reasons if side.fate == "late")
    assert late.mean_sampled is not None and found.trained.mean_sampled is not None and late.length is not None
    assert 80 < late.mean_sampled < 120 and 8 < found.trained.mean_sampled < 12
    assert late.length.direction == 1 and late.length.low > 60
    lines = told(found)
    assert any(line.startswith("late: longer ones are left out more: +") for line in lines)
    assert any(line.startswith("left out: longer ones") for line in lines)
    assert "late: no difference in group reward seen (+0, +0 to +0)" in lines
    assert "timeout: too few groups to compare sampled tokens (1; 20 are needed on each side)" in lines


def test_no_bias_is_no_finding(settings: Settings) -> None:
    found = _found(_scene(settings, 40, slow_are_long=False), settings)
    late = next(side for side in found.reasons if side.fate == "late")
    assert late.length is not None and late.length.direction == 0
    assert any(line.startswith("late: no difference in sampled tokens seen (") for line in told(found))


def test_the_command_prints_a_table_or_json(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _scene(settings, 3, slow_are_long=True)
    monkeypatch.setattr(preflight, "check_broker", lambda _: None)
    monkeypatch.setattr(wiring, "open_log", lambda *_, **__: log)
    monkeypatch.setattr(log, "close", lambda: None)
    capsys.readouterr()
    assert command(settings, policies=["main"], solved=1.0, as_json=False) == 0
    out = capsys.readouterr().out
    assert "demo.main: 10 trajectories, 8 of them left out" in out and "share" in out and "late" in out
    assert command(settings, policies=["main"], solved=1.0, as_json=True) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["left_out"]["trajectories"] == 8 and facts["left_out"]["length"]["enough_groups"] is False
    assert {side["fate"]: side["share"] for side in facts["reasons"]}["superseded"] is None


def test_one_value_per_group_is_the_ordinary_interval() -> None:
    """Clusters of one: Welch's standard error, but for the factors n/(n-1) that become one common G/(G-1)."""
    left, right = [1.0, 2.0, 4.0, 7.0], [0.0, 1.0, 1.0, 3.0, 5.0]
    found = compare([(f"l{n}", v) for n, v in enumerate(left)], [(f"r{n}", v) for n, v in enumerate(right)])
    assert found is not None
    spread = sum(
        sum((v - sum(side) / len(side)) ** 2 for v in side) / len(side) ** 2 for side in (left, right)
    ) * 9 / 8  # fmt: skip
    assert found.difference == pytest.approx(1.5)
    assert found.high - found.difference == pytest.approx(1.959963984540054 * math.sqrt(spread))


def test_members_of_a_group_are_no_independent_observations() -> None:
    """Each group eight times over is no more evidence; and of many unbiased draws about 5 % seem biased."""
    rng = random.Random(11)
    one = [(f"a{n}", rng.gauss(0, 1)) for n in range(30)], [(f"b{n}", rng.gauss(0, 1)) for n in range(30)]
    once, eight = compare(*one), compare(*([pair for pair in side for _ in range(8)] for side in one))
    assert once is not None and eight is not None and eight.low == pytest.approx(once.low)
    false = 0
    for _ in range(400):
        sides = []
        for name in "ab":
            side = []
            for n in range(40):
                mean = rng.gauss(0, 1)
                side += [(f"{name}{n}", mean + rng.gauss(0, 0.3)) for _ in range(6)]
            sides.append(side)
        found = compare(*sides)
        assert found is not None
        false += found.direction != 0
    assert 4 <= false <= 40  # 20 are expected; taken one by one, members would give about 190


def test_groups_on_both_sides_are_compared_with_themselves() -> None:
    """A member filter drops some of a group and keeps others: what they share cancels out."""
    rng = random.Random(3)
    left, right = [], []
    for n in range(50):
        level = rng.gauss(0, 100)
        left.append((f"g{n}", level + 1 + rng.gauss(0, 0.5)))
        right.append((f"g{n}", level + rng.gauss(0, 0.5)))
    found = compare(left, right)
    assert found is not None and found.direction == 1 and found.high - found.low < 1


def test_difficulty_and_few_groups() -> None:
    trained = [Seen(TRAINED, f"t{n}", "easy", 10, 0.8, 0.8) for n in range(MIN_GROUPS)]
    hard = [Seen("late", f"l{n}", "hard", 10, 0.1 + n / 1000, 0.0) for n in range(MIN_GROUPS)]
    waiting = [Seen(WAITING, "w", "easy", 10, 0.5, 0.5)]
    found = summary("demo", "main", [*trained, *hard, *waiting], 0, 0)
    (late,) = found.reasons
    assert late.reward is not None and late.reward.direction == -1
    assert sentences(late)[1].startswith("late: harder items are left out more: -0.691 in group reward")
    assert found.settled == 2 * MIN_GROUPS
    few = summary("demo", "main", [*trained, *hard[1:]], 0, 0)
    assert few.reasons[0].reward is not None and few.reasons[0].reward.direction == 0
    nothing = summary("demo", "main", [], 0, 0)
    assert nothing.settled == 0 and nothing.left_out.length is None and told(nothing)
