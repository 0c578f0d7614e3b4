"""Two real dispatchers at once: one stopped and continued (SIGSTOP, SIGCONT), its standby killed (SIGKILL), a third one ends the run."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import wiring
from infra.audit import audit
from infra.config import load
from infra.demo.watch import Watch
from support.demo import LIMIT_S, Home, environment

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

POLICY, STEPS = "alpha", 24


class Daemons:
    """A run's daemons, each started and ended by the test alone."""

    def __init__(self, home: Home, config: Path, run: str) -> None:
        self.home, self.config = home, config
        self.sets = (
            f'run.name="{run}"', f"policies.{POLICY}.train.steps={STEPS}",
            f"policies.{POLICY}.dispatch.heartbeat_timeout_s=3",
        )  # fmt: skip
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, name: str, *sets: str) -> None:
        line = ["--config", str(self.config), "--policy", POLICY, "--name", name]
        for entry in (*self.sets, *sets):
            line += ["--set", entry]
        with self.log(name).open("wb") as output:
            self.processes[name] = subprocess.Popen(
                self.home.arguments(role, *line), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self.home.folder, env=environment(),
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.home.folder / f"two-{name}.out"

    def said(self, name: str, text: str) -> bool:
        return text in self.log(name).read_text(errors="replace")

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def ended(self, name: str) -> int:
        """Its exit code, when it has ended."""
        return self.processes[name].wait(LIMIT_S)

    def until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not there():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(
            f"--- {name}\n" + self.log(name).read_text(errors="replace")[-1500:] for name in self.processes
        )

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(30)


@pytest.fixture
def daemons(served: Home) -> Iterator[Daemons]:
    found = Daemons(served, served.folder / "first.toml", "two")
    yield found
    found.kill()


@pytest.mark.prove
def test_one_stopped_and_continued_and_one_killed(daemons: Daemons) -> None:
    settings = load(daemons.config, daemons.sets).settings
    for role in ("train", "process", "rollout"):
        daemons.start(role, role)
    daemons.start("dispatch", "first")
    daemons.until(lambda: daemons.said("first", "claimed"), "the first one's claim")
    log = wiring.open_log(settings, client_id="tests")
    watch = Watch(log, settings, time.monotonic())
    try:

        def reach(steps: int) -> None:
            def there() -> bool:
                watch.poll(0.1)
                return watch.policies[POLICY].ledger.steps_done >= steps

            daemons.until(there, f"step {steps}")

        standby = f"policies.{POLICY}.dispatch.standby=true"
        daemons.start("dispatch", "second", standby)
        daemons.until(lambda: daemons.said("second", "waiting while another dispatcher lives"), "the standby")
        reach(4)
        assert not daemons.said("second", "claimed"), "it acts though the first one lives"
        daemons.send("first", signal.SIGSTOP)
        daemons.until(lambda: daemons.said("second", "claimed"), "the standby's claim")
        reach(watch.policies[POLICY].ledger.steps_done + 6)
        daemons.start("dispatch", "third", standby)
        daemons.until(lambda: daemons.said("third", "waiting while another dispatcher lives"), "the second standby")
        daemons.send("second", signal.SIGKILL)
        daemons.send("first", signal.SIGCONT)
        assert daemons.ended("first") == 4, daemons.logs()
        assert daemons.said("first", "Superseded")
        reach(STEPS)
        for name in ("rollout", "third"):
            daemons.send(name, signal.SIGTERM)
            assert daemons.ended(name) == 0, daemons.logs()

        def closed() -> bool:
            accounts = audit(log, "two", POLICY, max_tokens=settings.kafka.max_tokens).accounts
            return accounts.ok and accounts.pending == 0

        daemons.until(closed, "the end of every group")
        for name in ("process", "train"):
            daemons.send(name, signal.SIGTERM)
            assert daemons.ended(name) == 0, daemons.logs()
        found = audit(log, "two", POLICY, max_tokens=settings.kafka.max_tokens)
        accounts = found.accounts
        assert accounts.ok, accounts.findings
        assert (accounts.pending, accounts.unaccounted, accounts.twice) == (0, 0, 0), accounts
        assert found.ledger.steps_done == STEPS
        assert found.max_staleness_seen <= settings.policies[POLICY].train.max_staleness
    finally:
        watch.close()
        log.close()
