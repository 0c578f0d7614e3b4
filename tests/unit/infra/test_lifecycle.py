from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from infra import lifecycle, logs
from infra.daemon import Daemon, choose_policy, edge, resolve
from infra.lifecycle import Exit, Stop, exit_code, one_home
from infra.secrecy import redact
from infra.settings import PolicyTable, Settings
from schemas import errors

ROOT = Path(lifecycle.__file__).parent.parent


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingError("x"), Exit.SETTING),
        (errors.RecordTooLarge("x"), Exit.SETTING),
        (errors.BrokerError("x"), Exit.DEPENDENCY),
        (errors.ObjectMissing("x"), Exit.DEPENDENCY),
        (errors.EngineError("x"), Exit.DEPENDENCY),
        (errors.SendFailed("x"), Exit.DEPENDENCY),
        (errors.Superseded("x"), Exit.SUPERSEDED),
        (errors.DeadlineExceeded("x"), Exit.DEADLINE),
        (errors.LogGap("t", 0, 1, 2), Exit.FAILED),
        (errors.WeightsError("x"), Exit.FAILED),
        (ValueError("x"), Exit.BUG),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: Exit) -> None:
    assert exit_code(error) is code


def test_the_exit_codes_are_documented() -> None:
    assert all(f"\n| {code.value} |" in (lifecycle.__doc__ or "") for code in Exit)


def test_errors_of_ours_are_one_message_and_bugs_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    redact.add(["s3cr3t-EDGE"])

    def ours() -> int:
        raise errors.BrokerError("login with s3cr3t-EDGE failed")

    def bug() -> int:
        raise KeyError("s3cr3t-EDGE")

    assert edge(ours) == 3
    said = capsys.readouterr().err
    assert said == "offsetrl: BrokerError: login with *** failed\n"
    assert edge(bug) == 70
    said = capsys.readouterr().err
    assert "Traceback" in said and "KeyError" in said and "s3cr3t" not in said
    assert edge(lambda: 1) == 1


def test_stop_is_asked_for_and_waited_for() -> None:
    stop = Stop()
    assert not stop.wait(0.0) and not stop.requested
    stop.request()
    assert stop.wait(60.0) and stop.requested


CHILD = """
import sys, time
from infra.lifecycle import Stop
stop = Stop()
stop.on_abort(lambda: (print("aborting", flush=True), time.sleep(0.5)))  # long enough for both ways to meet
stop.install()
print("ready", flush=True)
while not stop.requested:
    stop.wait(30)
print("draining", flush=True)
if sys.argv[1] == "drain":
    sys.exit(0)
time.sleep(60)
"""


def child(mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, mode], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_the_first_signal_drains() -> None:
    with child("drain") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_aborts(number: signal.Signals) -> None:
    with child("hang") as process:
        assert process.stdout is not None
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert process.stdout.read() == "aborting\n"


STUCK = """
import signal, time
from infra.lifecycle import Stop
Stop().install()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the kernel must give it to another thread
print("ready", flush=True)
time.sleep(600)
"""


def test_a_main_thread_that_never_comes_back_is_aborted_all_the_same() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_all_rooms_live_in_one_home() -> None:
    one_home()


def test_a_room_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    for name in ("__init__", "errors", "names"):
        (tmp_path / "schemas" / f"{name}.py").write_text((ROOT / "schemas" / f"{name}.py").read_text())
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from infra.lifecycle import one_home; one_home()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert "OffsetRL's packages come from several places" in done.stderr and str(tmp_path) in done.stderr


def test_a_distribution_that_installs_a_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str, record: str) -> SimpleNamespace:
        return SimpleNamespace(metadata={"Name": name}, read_text=lambda _: record)

    fine = distribution("offsetrl", "schemas/__init__.py,sha256=x,1\n")
    below = distribution("other", "other/schemas/__init__.py,sha256=x,1\n")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [fine, below])
    one_home()
    rogue = distribution("rogue", "rogue/__init__.py,,\ninfra/__init__.py,sha256=x,1\n")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [fine, rogue])
    with pytest.raises(errors.SettingError, match="'rogue' installs a package 'infra'"):
        one_home()


def test_without_a_supervisor_a_parents_death_means_nothing() -> None:
    lifecycle.die_with_parent({})
    with pytest.raises(errors.SettingError, match="OFFSETRL_PARENT"):
        lifecycle.die_with_parent({"OFFSETRL_PARENT": "init"})


def test_a_child_of_a_supervisor_that_is_gone_already_ends_at_once() -> None:
    code = "from infra.lifecycle import die_with_parent; die_with_parent(); print('lives')"
    environ = {**os.environ, "OFFSETRL_PARENT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, cwd=ROOT, start_new_session=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL and not done.stdout


def test_names_are_resolved_late_and_clearly() -> None:
    assert resolve("json:dumps")([1]) == "[1]"
    with pytest.raises(errors.SettingError, match="needs the package 'nowhere'"):
        resolve("nowhere.at_all:run")
    with pytest.raises(errors.SettingError, match="has no function 'gone'"):
        resolve("json:gone")


def settings(*policies: str) -> Settings:
    return Settings(policies={name: PolicyTable(model=Path("m")) for name in policies})


def test_the_policy_is_chosen_or_refused() -> None:
    assert choose_policy(settings("main"), "") == "main"
    assert choose_policy(settings("main", "other"), "other") == "other"
    with pytest.raises(errors.SettingError, match="choose with --policy"):
        choose_policy(settings("main", "other"), "")
    with pytest.raises(errors.SettingError, match="did you mean 'main'"):
        choose_policy(settings("main", "other"), "mian")


def test_a_daemon_knows_its_own_table() -> None:
    given = settings("main")
    daemon = Daemon(given, "main", "w0", "", None, None, Stop())  # type: ignore[arg-type]
    assert daemon.table is given.policies["main"]


def test_logs_are_json_lines_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kafka"), "propagate", True)  # the log's adapter, once used, takes it over
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    redact.add(["s3cr3t-LOG"])
    try:
        logs.configure(0, {"role": "train", "run": "demo"}, stream)
        log = structlog.get_logger("offsetrl")
        log.info("took", version="0-3", password="s3cr3t-LOG")
        log.debug("not shown")
        logging.getLogger("kafka.conn").info("chatter")
        logging.getLogger("kafka.conn").warning("lost %s", "http://ann:pw@host")
        try:
            raise RuntimeError("s3cr3t-LOG")
        except RuntimeError:
            log.exception("failed")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.reset_defaults()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in found] == ["took", "lost http://***@host", "failed"]
    assert all(line["role"] == "train" and line["run"] == "demo" for line in found)
    assert found[0]["version"] == "0-3" and found[1]["logger"] == "kafka.conn"
    assert "RuntimeError" in found[2]["exception"]
    assert "s3cr3t" not in stream.getvalue() and ":pw@" not in stream.getvalue()


def test_a_stop_that_comes_while_waiting_is_seen() -> None:
    stop = Stop()
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, stop._handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert stop.wait(60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
