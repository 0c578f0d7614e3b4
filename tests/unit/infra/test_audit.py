"""The audit: whatever stands on a log is accounted for once, and whatever is wrong with it is found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infra.audit import Audit, Source, audit
from infra.audit_command import FIGURES, facts, table
from infra.memory_log import MemoryLog
from infra.provision import topic_specs
from schemas.records import Address, Member, Outcome, Plan, PlanDrop, Record, Result, Trajectory
from support.loop import append, make_log, make_settings
from support.samples import announcement, claim, close, dead_letter, member, outcome, trajectory

TIME_MS = 1_790_000_000_000
OWNER: dict[str, Any] = {"epoch": 2, "nonce": "0a1b2c3d"}


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    return make_log(make_settings(tmp_path), clock_ms=lambda: TIME_MS + 1000)


def came(group: str, index: int, **changes: object) -> Trajectory:
    fields = {"group": group, "group_size": 2, "index": index, "partition": 0, "first_request_time_ms": TIME_MS}
    return trajectory(**fields | changes)


def judged(group: str, offsets: Sequence[int], closing: int, previous: int, disposition: str = "kept") -> Outcome:
    def one(index: int, offset: int) -> Member:
        found = member(index=index, offset=offset)
        return (
            found
            if disposition == "kept"
            else replace(
                found, disposition=disposition, tokens=b"", loss_mask=b"", logprobs=b"", versions=(), segments=()
            )
        )

    return outcome(
        group=group, group_size=2, partition=0, closing_offset=closing, previous=previous, disposition=disposition,
        oldest_version=6 if disposition == "kept" else -1, members=tuple(one(i, o) for i, o in enumerate(offsets)),
    )  # fmt: skip


def planned(step: int, samples: Sequence[Address], drops: Sequence[PlanDrop] = ()) -> Plan:
    return Plan(
        run="demo", policy="main", **OWNER, step=step, samples=tuple(samples), drops=tuple(drops), max_age=0, seed=0,
        config_digest="",
    )  # fmt: skip


def done(step: int) -> Result:
    return Result(run="demo", policy="main", **OWNER, step=step, version=step + 1, digest="d")


def a_run(log: MemoryLog, *, without: str = "") -> None:
    """Records of every fate on partition 0; `without`: one kind of record that somebody lost."""
    stream: list[Record] = [
        came("g1", 0), came("g1", 1),  # 0, 1: trained
        came("g2", 0), came("g2", 1),  # 2, 3: dropped by the group filter
        came("g3", 0), close(group="g3", partition=0),  # 4: dropped, incomplete; 5: a close record
        came("g3", 1),  # 6: late
        came("g2", 1, attempt=1),  # 7: superseded
        came("g4", 0, first_request_time_ms=TIME_MS - 500_000),  # 8: late by itself
        came("g5", 0), came("g5", 1),  # 9, 10: set aside by a plan
        came("g6", 5),  # 11: not sound, a dead letter
        came("g7", 0), came("g7", 1),  # 12, 13: awaiting a plan
        came("g8", 0), came("g8", 1),  # 14, 15: awaiting an outcome
        came("g9", 0),  # 16: open
    ]  # fmt: skip
    append(log, "trajectories", *stream)
    chain = {
        "g1": judged("g1", (0, 1), 1, -1), "g2": judged("g2", (2, 3), 3, 1, "zero-spread"),
        "g3": judged("g3", (4,), 5, 3, "incomplete"), "g5": judged("g5", (9, 10), 10, 5), "g7": judged("g7", (12, 13), 13, 10),
    }  # fmt: skip
    samples = [record for name, record in chain.items() if name != without]
    append(log, "samples", *samples, *samples[:2])
    if without != "dead letter":
        append(log, "dead-letters", dead_letter(partition=0, offset=11))
    append(log, "steps", claim(), planned(0, [Address(0, 0, 1, 2)], [PlanDrop(0, 3, 10, 2, "stale", 4)]))
    if without != "result":
        append(log, "steps", done(0))
    append(log, "weights", claim(head_version=-1), announcement(version=0), announcement(version=1))


def audited(log: MemoryLog) -> Audit:
    return audit(log, "demo", "main", max_tokens=1000)


def test_every_record_is_accounted_for_once(log: MemoryLog) -> None:
    a_run(log)
    found = audited(log)
    accounts = found.accounts
    assert accounts.ok, accounts.findings
    assert accounts.produced == 16
    assert (accounts.trained, accounts.dropped, accounts.dead_lettered) == (2, 5, 1)
    assert (accounts.late, accounts.superseded, accounts.pending) == (2, 1, 5)
    assert accounts.drops_by_reason == {"zero-spread": 2, "incomplete": 1, "stale": 2}
    assert accounts.pending_by_reason == {"awaiting plan": 2, "awaiting outcome": 2, "group open": 1}
    assert found.versions_published == 2
    assert found.trained_tokens == {(1, 6): 4, (1, 7): 2}
    assert [(step, outcome.group) for step, outcome in found.trained_outcomes] == [(0, "g1")]
    assert [outcome.group for outcome in found.waiting_outcomes] == ["g7"]


def test_the_age_comes_from_the_tokens_and_not_from_the_plans_word(log: MemoryLog) -> None:
    a_run(log)
    assert audited(log).max_staleness_seen == 0 - 6


def test_a_plan_without_a_result_has_not_trained(log: MemoryLog) -> None:
    a_run(log, without="result")
    found = audited(log)
    assert found.accounts.ok and found.accounts.trained == 0
    assert found.accounts.pending_by_reason["awaiting plan"] == 4
    assert found.max_staleness_seen == -1


@pytest.mark.parametrize("lost", ["g1", "g2", "g5", "dead letter"])
def test_what_was_lost_is_found(log: MemoryLog, lost: str) -> None:
    a_run(log, without=lost)
    assert not audited(log).accounts.ok


def test_the_last_outcome_lost_is_found_by_the_plan_that_names_it(log: MemoryLog) -> None:
    append(log, "trajectories", came("g1", 0), came("g1", 1))
    append(log, "steps", claim(), planned(0, [Address(0, 0, 1, 2)]), done(0))
    accounts = audited(log).accounts
    assert accounts.findings == ("1 outcomes named by plans are not on samples as named: 0:1",)


def test_an_outcome_that_claims_a_strangers_record_is_found(log: MemoryLog) -> None:
    append(log, "trajectories", came("g1", 0), came("g1", 1))
    append(log, "samples", judged("g1", (0, 7), 1, -1))
    accounts = audited(log).accounts
    assert accounts.unaccounted == 2, "offset 1 is in no set, offset 7 is not on the log"


def test_two_attempts_of_one_member_trained_are_found(log: MemoryLog) -> None:
    append(log, "trajectories", came("g1", 0), came("g1", 1), came("g1", 1, attempt=1))
    first = judged("g1", (0, 1), 1, -1)
    second = replace(judged("g1", (2,), 2, 1), members=(member(index=1, offset=2),))
    append(log, "samples", first, second)
    append(log, "steps", claim(), planned(0, [Address(0, 0, 1, 2), Address(0, 1, 2, 1)]), done(0))
    assert audited(log).accounts.twice == 1


def test_void_records_and_outcomes_in_a_wrong_place_do_not_count(log: MemoryLog) -> None:
    a_run(log)
    append(log, "steps", replace(planned(1, [Address(0, 4, 13, 2)]), nonce="zombie"), replace(done(1), epoch=1))
    append(log, "samples", judged("g7", (12, 13), 13, -1), partition=1)
    accounts = audited(log).accounts
    assert accounts.ok and accounts.trained == 2


def test_a_close_record_in_a_wrong_place_is_a_dead_letter_like_any_other(log: MemoryLog) -> None:
    append(log, "trajectories", came("g1", 0), close(group="g1", partition=1))
    append(log, "dead-letters", dead_letter(partition=0, offset=1))
    accounts = audited(log).accounts
    assert accounts.ok and accounts.pending_by_reason == {"group open": 1}


def test_a_planted_fault_is_found(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(log)
    monkeypatch.setenv("OFFSETRL_PLANT", "lose-outcome")
    assert not audited(log).accounts.ok


def test_a_derived_run_is_audited_against_its_source(log: MemoryLog, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    copy = settings.model_copy(update={"run": settings.run.model_copy(update={"name": "copy"})})
    log.create(topic_specs(copy))
    append(log, "trajectories", came("g1", 0), came("g1", 1))
    found = audit(log, "copy", "main", max_tokens=1000, source=Source("demo", "main"))
    assert found.accounts.pending_by_reason == {"awaiting outcome": 2}


def test_the_table_and_the_json_say_the_same(log: MemoryLog) -> None:
    a_run(log)
    found = audited(log)
    data = json.loads(json.dumps(facts(found)))
    assert data["ok"] and data["trained"] == 2 and data["drops_by_reason"]["stale"] == 2
    console = Console(record=True, width=100)
    console.print(table([found]))
    text = console.export_text()
    for name in FIGURES:
        assert name.replace("_", " ") in text
    assert "books close" in text and "pending: awaiting plan" in text
