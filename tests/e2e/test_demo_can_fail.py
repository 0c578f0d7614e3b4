"""The demo can fail: each of its checks is made to fail once, and it exits non-zero and names what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from infra.lifecycle import Exit
from infra.planted import VARIABLE
from support.demo import Finished, Home

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]


def failed_checks(done: Finished) -> Mapping[str, str]:
    entries: list[dict[str, Any]] = done.figures["checks"]["alpha"]
    return {entry["name"]: entry["said"] for entry in entries if not entry["ok"]}


def test_a_learner_that_does_not_learn(served: Home) -> None:
    done = served.demo("--steps", "8", "--set", "policies.alpha.train.learning_rate=0").expect(Exit.FAILED)
    assert set(failed_checks(done)) == {"reward rises"}
    assert done.figures["ok"] is False and done.figures["pending"] == 0
    assert "FAIL alpha: reward rises" in done.out


def test_workers_that_keep_their_first_weights(served: Home) -> None:
    arguments = ("--steps", "12", "--stall-s", "8", "--set", "policies.alpha.rollout.pickup=false")
    done = served.demo(*arguments).expect(Exit.DEADLINE)
    said = done.out.replace("\n", " ")
    assert "no step and no version for 8 s" in said and "waits for newer weights in a rollout worker" in said, said
    assert "version 0 is in use" in said
    assert not done.figures["ok"]
    assert "no step and no version for 8 s" in failed_checks(done)["runs to its end"]


def test_an_outcome_lost_from_the_log(served: Home, finished: Finished) -> None:
    lossy = {VARIABLE: "lose-outcome"}
    done = served.demo("--steps", "6", env=lossy).expect(Exit.FAILED)
    said = failed_checks(done)["accounting closes"]
    assert done.figures["unaccounted"] > 0 and f"unaccounted {done.figures['unaccounted']}" in said
    audited = served.command("audit", "--config", str(finished.config), env=lossy).expect(Exit.FAILED)
    assert "unaccounted" in audited.out
    served.command("audit", "--config", str(finished.config)).expect()


def test_a_daemon_that_can_never_run_ends_the_demo_at_once(served: Home) -> None:
    wrong = 'policies.alpha.rollout.engine="nowhere.at_all:engine"'
    done = served.demo("--steps", "6", "--set", wrong)
    assert done.code not in (0, Exit.BUG), done.out
    assert "nowhere.at_all" in done.out and "rollout" in done.out
