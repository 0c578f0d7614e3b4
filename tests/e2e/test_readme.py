"""The README's own example: its files and its commands, taken from the page and run as they stand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## Your own model, prompts and reward"
LIMIT_S = 420

pytestmark = [pytest.mark.timeout(LIMIT_S + 60), pytest.mark.e2e, pytest.mark.broker, pytest.mark.s3, pytest.mark.model]


def example() -> tuple[dict[str, str], str]:
    """Files by name, and the commands."""
    section = (ROOT / "README.md").read_text("utf-8").partition(SECTION)[2].partition("\n## ")[0]
    files = dict(re.findall(r"^`([\w.]+)` [^\n]*:\n\n```\w+\n(.*?)```", section, re.MULTILINE | re.DOTALL))
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return files, commands


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    files, commands = example()
    assert set(files) == {"prompts.py", "rewards.py", "offsetrl.toml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    beside = str(Path(sys.executable).parent)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OFFSETRL_", "KAFKA_"))}
    environment |= {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, warned = shell.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # whatever the commands left behind
        subprocess.run([f"{beside}/offsetrl", "down"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    said = {path.name: path.read_text("utf-8")[-2000:] for path in tmp_path.glob("*.log")}
    assert shell.returncode == 0, (printed[-3000:], warned[-3000:], said)
    assert re.search(r"books close\W+yes", printed), printed[-3000:]
    last = json.loads(next(line for line in printed.splitlines() if '"record": "Result"' in line))
    assert last["version"] == 20 and 0.0 < last["metrics"]["reward_mean"] <= 1.0
    assert "stopped:" in printed.splitlines()[-1]
