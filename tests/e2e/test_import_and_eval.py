"""`offsetrl import` and `offsetrl eval` as processes, beside a finished run: killed in the middle, and without a second effect."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from infra.log import Log, Place
from infra.ownership import read_all, read_record
from producers.environments.sort_digits import sort_digits
from schemas.names import topic
from schemas.records import Eval
from support.demo import Finished, Home, environment, wait_until

pytestmark = [pytest.mark.prove, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]


def evals(log: Log, run: str) -> list[Eval]:
    name = topic(run, "alpha", "evals")
    envelopes = read_all(log, Place(name, 0), log.bounds(name)[0])
    return [record for envelope in envelopes if isinstance(record := read_record(envelope), Eval)]


def test_a_killed_evaluator_is_followed_by_one_that_measures_the_rest(served: Home, finished: Finished) -> None:
    arguments = ("eval", "--config", str(finished.config), "--policy", "alpha", "--every", "10", "--episodes", "32")
    trajectories = topic("first", "alpha", "trajectories")
    with served.log("first") as log:
        before = log.bounds(trajectories)
        with subprocess.Popen(
            served.arguments(*arguments), cwd=served.folder, env=environment(None), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                wait_until(lambda: bool(evals(log, "first")) or process.poll() is not None, "an evaluation", 180.0)
            finally:
                process.send_signal(signal.SIGKILL)
        served.command(*arguments).expect()
        found = evals(log, "first")
        assert [record.version for record in found] == [0, 10, 20, 30], "each once, the run's last included"
        assert all(record.num_failed == 0 and record.num_episodes == 32 for record in found)
        served.command("eval", "--config", str(finished.config), "--version", f"{found[1].epoch}-10").expect()
        assert len(evals(log, "first")) == 4 and log.bounds(trajectories) == before
    said = json.loads(served.command("status", "--config", str(finished.config), "--json").expect().out)
    assert said["evals"][0]["version"] == f"{found[-1].epoch}-30"
    served.command("audit", "--config", str(finished.config)).expect()


def demonstrations(path: Path, count: int) -> Path:
    """Answers to items of the demo's task."""
    sessions = [sort_digits(0, digits=3).open(item, "", 0) for item in range(count)]
    rows = [{"prompt": session.observe().text, "completion": session.expected} for session in sessions]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_an_import_counts_once_and_a_bad_file_not_at_all(served: Home, finished: Finished, tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "demos.jsonl", 1200)
    config = ("--config", str(finished.config), "--policy", "alpha", "--set", 'policies.alpha.source.run="demos"')
    checked = served.command("import", str(path), *config, "--check").expect()
    assert "1200 demonstrations of 9600 tokens, 4800 of them to be learnt" in checked.out
    with served.log("first") as log:
        assert topic("demos", "alpha", "trajectories") not in log.topics(), "--check sends nothing"
        first = served.command("import", str(path), *config).expect()
        assert "1200 sent, 0 stood on the log before" in first.out
        again = served.command("import", str(path), *config).expect()
        assert "0 sent, 1200 stood on the log before" in again.out
        path.write_text(path.read_text() + '\n{"prompt": "12>"}\n')
        bad = served.command("import", str(path), *config).expect(2)
        assert f"{path}:1201: expected either messages" in bad.out
        ends = [bounds.end for bounds in log.bounds(topic("demos", "alpha", "trajectories")).values()]
        assert sum(ends) == 1200
