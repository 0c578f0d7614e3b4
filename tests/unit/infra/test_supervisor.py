"""The supervisor with real child processes; nothing here is mocked, and every process id is checked at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra import supervisor as supervisor_module
from infra.supervisor import ChildSpec, Supervisor
from schemas.errors import DeadlineExceeded

ROOT = Path(supervisor_module.__file__).parent.parent
LIMIT_S = 30.0

LINE = "import os, sys, time, signal, subprocess, pathlib\n"
SLEEP = LINE + "print('up', flush=True); time.sleep(600)"
DRAINS = LINE + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(600)"
STUBBORN = LINE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
DAEMON = (
    LINE + "from infra.lifecycle import die_with_parent; die_with_parent(); print('up', flush=True); time.sleep(600)"
)
WITH_HELPER = (
    LINE + "h = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "pathlib.Path(sys.argv[1]).write_text(str(h.pid)); print('up', flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_BACKOFF_S", (0.05, 0.2))


@pytest.fixture(autouse=True)
def _no_orphans() -> Iterator[None]:
    """Whatever the tests start is gone when they end."""
    before = set(psutil.pids())
    yield

    def left() -> list[int]:
        """Children of ours, and what runs our sleeping programs under whatever parent."""
        found = [child.pid for child in psutil.Process().children(recursive=True)]
        for process in psutil.process_iter(["cmdline"]):
            if "time.sleep(600)" in " ".join(process.info["cmdline"] or ()):
                found.append(process.pid)
        return [pid for pid in found if pid not in before]

    until(lambda: not left())


def spec(tmp_path: Path, name: str, code: str, *arguments: str) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=[sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": str(ROOT)},
        log_path=tmp_path / "logs" / f"{name}.log",
    )


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_children_run_and_end_with_the_context(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", SLEEP), spec(tmp_path, "b", SLEEP)]) as supervisor:
        pids = supervisor.pids()
        assert set(pids) == {"a", "b"} and not any(map(gone, pids.values()))
        assert all(os.getpgid(pid) == pid for pid in pids.values())
    assert all(map(gone, pids.values()))


def test_what_dies_is_started_again_and_counted(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", SLEEP)]) as supervisor:
        first = supervisor.pids()["a"]
        os.kill(first, signal.SIGKILL)
        until(lambda: supervisor.pids().get("a", first) != first)
        assert supervisor.exits() == {"a": (-signal.SIGKILL,)}
        assert [status.restarts for status in supervisor.status()] == [1]
        assert not supervisor.finished()


@pytest.mark.parametrize("code", [0, 2, 4])
def test_these_exit_codes_are_final(tmp_path: Path, code: int) -> None:
    with Supervisor([spec(tmp_path, "a", f"print('bye'); raise SystemExit({code})")]) as supervisor:
        supervisor.wait(["a"], LIMIT_S)
        time.sleep(0.3)  # long enough for a restart, were there one
        assert supervisor.exits() == {"a": (code,)} and supervisor.finished() == {"a": code}
        assert supervisor.tail("a") == "bye"


def test_one_that_never_lives_is_given_up(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", "raise SystemExit(3)")], give_up_after=3) as supervisor:
        supervisor.wait(["a"], LIMIT_S)
        assert supervisor.exits() == {"a": (3, 3, 3)}
        assert [status.restarts for status in supervisor.status()] == [2]


def test_told_to_end_it_drains_and_stays_down(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", DRAINS), spec(tmp_path, "b", SLEEP)]) as supervisor:
        until(lambda: supervisor.tail("a") == "up")
        other = supervisor.pids()["b"]
        assert supervisor.terminate(["a"], LIMIT_S) == {"a": 0}
        time.sleep(0.3)
        assert supervisor.pids() == {"b": other}


def test_one_that_does_not_listen_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", STUBBORN)]) as supervisor:
        until(lambda: supervisor.tail("a") == "up")
        assert supervisor.terminate(["a"], 0.2) == {"a": -signal.SIGKILL}
        assert supervisor.finished() == {"a": -signal.SIGKILL}


def test_one_can_be_added_while_others_run(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", SLEEP)]) as supervisor:
        supervisor.add(spec(tmp_path, "b", SLEEP))
        until(lambda: set(supervisor.pids()) == {"a", "b"})


def test_waiting_has_a_limit_that_names_the_child(tmp_path: Path) -> None:
    with (
        Supervisor([spec(tmp_path, "a", SLEEP)]) as supervisor,
        pytest.raises(DeadlineExceeded, match=r"a still ran after 0\.1 s"),
    ):
        supervisor.wait(["a"], 0.1)


def test_helpers_of_a_child_die_with_it(tmp_path: Path) -> None:
    note = tmp_path / "helper"
    with Supervisor([spec(tmp_path, "a", WITH_HELPER, str(note))]) as supervisor:
        until(lambda: supervisor.tail("a") == "up")
        helper = int(note.read_text())
        os.kill(supervisor.pids()["a"], signal.SIGKILL)
        until(lambda: gone(helper))
        until(lambda: supervisor.tail("a").endswith("up\nup"))
        helper = int(note.read_text())
        supervisor.terminate(["a"], LIMIT_S)
        assert gone(helper)


def test_an_error_in_the_context_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), Supervisor([spec(tmp_path, "a", SLEEP)]) as supervisor:
        pid = supervisor.pids()["a"]
        raise RuntimeError
    assert gone(pid)


def test_a_program_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    bad = ChildSpec(name="a", argv=[str(tmp_path / "nothing")], log_path=tmp_path / "a.log")
    with pytest.raises(FileNotFoundError), Supervisor([bad]):
        pass


def test_a_killed_reaper_is_replaced_and_knows_all(tmp_path: Path) -> None:
    with Supervisor([spec(tmp_path, "a", SLEEP)]) as supervisor:
        assert supervisor._reaper is not None
        old = supervisor._reaper.pid
        os.kill(old, signal.SIGKILL)
        until(lambda: gone(old))
        supervisor.add(spec(tmp_path, "b", SLEEP))
        until(lambda: supervisor._reaper is not None and supervisor._reaper.pid != old)
        until(lambda: len(supervisor.pids()) == 2)


SUPERVISOR = """
import sys, time
from pathlib import Path
from infra import logs
from infra.lifecycle import Stop
from infra.supervisor import ChildSpec, Supervisor
folder, mode, daemon, helper = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
note = str(folder / "helper")
specs = [
    ChildSpec(name="a", argv=[sys.executable, "-c", daemon], log_path=folder / "a.log"),
    ChildSpec(name="b", argv=[sys.executable, "-c", helper, note], log_path=folder / "b.log"),
]
logs.configure()
stop = Stop()
if mode == "listens":
    stop.install()
with Supervisor(specs) as supervisor:
    stop.on_abort(supervisor.kill)
    while not all(supervisor.tail(name) == "up" for name in "ab"):
        time.sleep(0.02)
    print(*supervisor.pids().values(), (folder / "helper").read_text(), flush=True)
    while mode != "raises" and not stop.requested:
        time.sleep(0.05)
    if mode == "raises":
        raise RuntimeError("a bug")
    print("stopping", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("mode", "signals"),
    [
        ("deaf", [signal.SIGKILL]),
        ("deaf", [signal.SIGTERM]),
        ("deaf", [signal.SIGINT]),
        ("deaf", [signal.SIGHUP]),
        ("listens", [signal.SIGTERM, signal.SIGTERM]),
        ("raises", []),
    ],
)
def test_children_and_their_helpers_never_outlive_the_supervisor(
    tmp_path: Path, mode: str, signals: list[signal.Signals]
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), mode, DAEMON, WITH_HELPER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids = [int(word) for word in line.split()]
        assert len(pids) == 3
        try:
            for turn, number in enumerate(signals):
                if turn:
                    assert process.stdout.readline() == "stopping\n"
                process.send_signal(number)
            assert process.wait(LIMIT_S) != 0
            until(lambda: all(map(gone, pids)))
        finally:
            process.kill()


def test_a_daemon_dies_with_its_supervisor_even_without_the_reaper(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "deaf", DAEMON, WITH_HELPER]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        daemon, other, helper = (int(word) for word in process.stdout.readline().split())
        for child in psutil.Process(process.pid).children():
            if "reaper.py" in " ".join(child.cmdline()):
                child.kill()
        process.kill()
        process.wait(LIMIT_S)
        until(lambda: gone(daemon))
        os.killpg(other, signal.SIGKILL)  # no daemon of ours: nothing else ends it once the reaper is gone
        until(lambda: gone(helper))
