"""The demo and other commands as a user starts them: processes of their own, their output kept, their children known.

    home = Home(tmp_path)
    done = home.demo("--steps", "10")                  # waits for its end
    with home.started("--steps", "10") as running:     # or takes part in it
        running.wait_steps(3)
        running.kill_child("train")
        done = running.finish()

A process counts as a home's when its command line names the home's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from infra import wiring
from infra.config import load
from infra.demo.watch import Watch
from infra.log import Log
from infra.settings import Settings
from schemas.errors import OffsetRLError

COMMAND = (sys.executable, "-m", "infra.cli.main")
ROLES = ("train", "rollout", "process", "dispatch")
LIMIT_S = 240.0
"""Longest wait for anything; a test that meets it fails with the logs."""
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    arguments: tuple[str, ...]
    code: int
    out: str
    """What it printed, standard error included."""
    result: Mapping[str, Any] | None
    """What it wrote to `--json`."""
    config: Path
    """The run's settings file."""
    logs: str
    """The last lines of its children."""

    def expect(self, code: int = 0) -> Finished:
        """Itself, if it ended so; else everything that helps to find out why not."""
        assert self.code == code, (
            f"{' '.join(self.arguments)}: exit code {self.code}, not {code}\n{self.out}\n{self.logs}"
        )
        return self

    @property
    def figures(self) -> Mapping[str, Any]:
        """The result, which must be there."""
        assert self.result is not None, f"no result was written\n{self.out}\n{self.logs}"
        return self.result


class Home:
    """A folder for demos: settings, model, servers' data and logs of all its runs."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sets = sets
        """`--set` of every command."""
        self.serves = False
        """Whether a test has started its servers to stay."""

    def arguments(self, *arguments: str) -> list[str]:
        """A command line of `offsetrl`."""
        return [*COMMAND, *arguments, *(part for entry in self.sets for part in ("--set", entry))]

    def command(self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = LIMIT_S) -> Finished:
        """Any command, run to its end."""
        line = self.arguments(*arguments)
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder, env=environment(env), check=False
        )
        return Finished(tuple(line), done.returncode, done.stdout + done.stderr, None, Path(), "")

    def demo(self, *arguments: str, env: Mapping[str, str] | None = None, run: str = "") -> Finished:
        """A demo with the light engine, run to its end."""
        with self.started(*arguments, env=env, run=run) as running:
            return running.finish()

    @contextlib.contextmanager
    def started(
        self, *arguments: str, env: Mapping[str, str] | None = None, run: str = "", engine: str = "transformers"
    ) -> Iterator[Running]:
        """A demo that runs; whatever is left of it is killed at the end."""
        running = Running(self, run or f"run-{next(_numbers)}", engine, arguments, env)
        try:
            yield running
        finally:
            running.close()

    def settings(self, run: str) -> Settings:
        """The settings of a run."""
        return load(self.folder / f"{run}.toml", self.sets).settings

    @contextlib.contextmanager
    def log(self, run: str) -> Iterator[Log]:
        """The run's log."""
        log = wiring.open_log(self.settings(run), client_id="tests")
        try:
            yield log
        finally:
            log.close()

    def left(self) -> list[str]:
        """Command lines of this home's processes, ours excepted."""
        return [" ".join(line) for _, line in self.processes()]

    def processes(self) -> list[tuple[psutil.Process, list[str]]]:
        """This home's processes with their command lines."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            if process.pid != os.getpid() and any(str(self.folder) in part for part in line):
                found.append((process, line))
        return found

    def daemons(self) -> list[str]:
        """Command lines of this home's processes that are no servers: servers may stay, daemons may not."""
        return [
            " ".join(line) for _, line in self.processes() if not any("-Doffsetrl.server=" in part for part in line)
        ]


class Running:
    """A demo under way."""

    def __init__(
        self, home: Home, run: str, engine: str, arguments: Sequence[str], env: Mapping[str, str] | None
    ) -> None:
        self.home, self.run = home, run
        self.config = home.folder / f"{run}.toml"
        self._json = home.folder / f"{run}.json"
        self._output = home.folder / f"{run}.out"
        named = ["--folder", str(home.folder), "--run", run, "--engine", engine, "--json", str(self._json)]
        self.arguments = home.arguments("demo", *named, *arguments)
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                self.arguments, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=home.folder, env=environment(env), start_new_session=True,
            )  # fmt: skip
        self._log: Log | None = None
        self._watch: Watch | None = None

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def finish(self, timeout_s: float = LIMIT_S) -> Finished:
        """Wait for its end."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the demo still runs after {timeout_s:g} s\n{self.out}\n{self._logs()}") from None
        result = json.loads(self._json.read_text()) if self._json.exists() else None
        return Finished(tuple(self.arguments), code, self.out, result, self.config, self._logs())

    def close(self) -> None:
        """Kill what is left, children first known by their parent; never touches processes of other homes."""
        self.let_go()
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)

    def let_go(self) -> None:
        """Close the connection to its broker, before that is killed: the client's own retries leave sockets unclosed."""
        if self._watch is not None:
            self._watch.close()
        if self._log is not None:
            self._log.close()
        self._watch = self._log = None

    def family(self) -> list[psutil.Process]:
        """The demo and all that it has started, while it lives."""
        try:
            parent = psutil.Process(self.process.pid)
            return [*parent.children(recursive=True), parent] if self.process.poll() is None else []
        except psutil.NoSuchProcess:
            return []

    # Children ------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Process ids of its daemons, by role/policy."""
        found = {}
        for process, line in self.home.processes():
            role = next((part for part in line if part in ROLES), "")
            if role and "--policy" in line and str(self.config) in line:
                found[f"{role}/{line[line.index('--policy') + 1]}"] = process.pid
        return found

    def wait_children(self, policies: Sequence[str] = ("alpha",)) -> dict[str, int]:
        """Until every daemon runs."""
        wanted = {f"{role}/{policy}" for role in ROLES for policy in policies}
        self.until(lambda: wanted <= set(self.pids()), f"its daemons: {wanted}")
        return self.pids()

    def kill_child(self, role: str, policy: str = "alpha") -> int:
        """SIGKILL for one daemon; its pid."""
        pid = self.pids()[f"{role}/{policy}"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def watch(self) -> Watch:
        """A reader of the run's log; waits until there is one."""
        if self._watch is None:
            self.until(self._open, "its log")
        assert self._watch is not None
        return self._watch

    def _open(self) -> bool:
        if not self.config.exists():
            return False
        try:
            settings = self.home.settings(self.run)
            self._log = self._log or wiring.open_log(settings, client_id="tests")
            if not any(name.startswith(f"{self.run}.") for name in self._log.topics()):
                return False
            self._watch = Watch(self._log, settings, time.monotonic())
        except (OffsetRLError, KeyError):  # servers or topics are not there yet
            return False
        return True

    def wait_steps(self, steps: int, policy: str = "alpha") -> None:
        """Until so many steps are trained."""
        watch = self.watch()

        def enough() -> bool:
            watch.poll(0.1)
            return watch.policies[policy].ledger.steps_done >= steps

        self.until(enough, f"step {steps} of {policy}")

    def until(self, there: Callable[[], bool], what: str, timeout_s: float = LIMIT_S) -> None:
        """Poll while the demo lives."""
        deadline = time.monotonic() + timeout_s
        while not there():
            ended = self.process.poll()
            assert ended is None, f"the demo ended ({ended}) before {what}\n{self.out}\n{self._logs()}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{self.out}\n{self._logs()}"
            time.sleep(0.05)

    def _logs(self) -> str:
        parts = []
        for path in sorted((self.home.folder / "logs" / self.run).glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of whoever runs the tests."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OFFSETRL_", "KAFKA_"))}
    return own | dict(more or {})


def wait_until(there: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll; fails naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)
