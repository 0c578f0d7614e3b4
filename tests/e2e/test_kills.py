"""SIGKILL for each daemon in the middle of a demo, for the broker, and for the demo itself; polite ends as well."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from infra.embedded import servers
from support.demo import ROLES, Finished, Home, Running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]


def books_close(done: Finished) -> Mapping[str, Any]:
    found = done.figures
    assert (found["pending"], found["unaccounted"], found["twice"]) == (0, 0, 0), done.out
    assert found["produced"] == sum(
        found[name] for name in ("trained", "dropped", "dead_lettered", "late", "superseded")
    )
    return found


def kill_and_see_it_again(running: Running, role: str) -> None:
    """SIGKILL, and wait for the successor."""
    name = f"{role}/alpha"
    dead = running.kill_child(role)
    running.until(lambda: running.pids().get(name, dead) != dead, f"a successor of {name}")


def test_every_daemon_killed_in_turn(served: Home) -> None:
    with served.started("--steps", "30") as running:
        for step, role in zip((2, 6, 11, 16), random.Random(0).sample(ROLES, len(ROLES)), strict=True):
            running.wait_steps(step)
            kill_and_see_it_again(running, role)
        done = running.finish().expect()
    found = books_close(done)
    assert found["steps"] == 30 and found["ok"] is True
    assert found["max_staleness_seen"] <= found["max_staleness_allowed"]


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("role", ROLES)
def test_one_daemon_killed_at_any_moment(served: Home, role: str, seed: int) -> None:
    step = random.Random(f"{role}{seed}").randint(0, 20)
    print(f"role {role}, seed {seed}: after step {step}")
    with served.started("--steps", "25") as running:
        running.wait_children()
        running.wait_steps(step)
        kill_and_see_it_again(running, role)
        done = running.finish().expect()
    assert books_close(done)["ok"] is True


@pytest.mark.prove
def test_the_same_daemon_killed_again_and_again(served: Home) -> None:
    with served.started("--steps", "30", "--stall-s", "60") as running:
        for step in (1, 4, 8):
            for role in ("process", "dispatch"):
                running.wait_steps(step)
                kill_and_see_it_again(running, role)
        done = running.finish().expect()
    assert books_close(done)["steps"] == 30


@pytest.mark.prove
@pytest.mark.parametrize("name", [servers.KAFKA, servers.S3])
def test_a_server_killed_in_the_middle(fresh: Home, name: str) -> None:
    with fresh.started("--steps", "25") as running:
        running.wait_steps(5)
        running.let_go()
        (killed,) = (status.pid for status in servers.status(fresh.folder / "state") if status.name == name)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        done = running.finish().expect()
    assert books_close(done)["steps"] == 25
    assert f"embedded {name} had died; started again" in done.out


def test_sigkill_of_the_demo_leaves_no_daemon(fresh: Home) -> None:
    with fresh.started("--steps", "1000") as running:
        running.wait_children()
        family = running.family()
        running.process.kill()
        running.process.wait(30)
        wait_until(lambda: not alive(family), "the end of all that the demo had started")
    assert fresh.daemons() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.prove)])
def test_an_interrupted_demo_ends_everything_and_says_so(fresh: Home, number: signal.Signals) -> None:
    with fresh.started("--steps", "1000") as running:
        running.wait_children()
        family = running.family()
        running.process.send_signal(number)
        done = running.finish(60)
        assert done.code not in (0, 70), done.out
        assert "interrupted" in done.out
        wait_until(lambda: not alive(family), "the end of all that the demo had started")
    assert fresh.left() == [], "its servers went with it"


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
