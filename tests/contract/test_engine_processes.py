"""vLLM with a model spread over several worker processes, as over several GPUs: a swap reaches each of them.

Runs on CPU cores here; on GPUs the same setting puts each process on a device of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support import two_processes
from support.engine_bench import TOLERANCE


@pytest.mark.prove
@pytest.mark.model
def test_a_swap_reaches_every_worker_process() -> None:
    program = Path(two_processes.__file__)
    paths = os.pathsep.join([str(program.parents[2]), str(program.parents[1])])
    with subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        out, err = child.communicate(timeout=900)
    assert child.returncode == 0, err[-4000:]
    deadline = time.monotonic() + 60
    while (left := members(child.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "its workers ended with it"
    found = json.loads(out.splitlines()[-1])
    assert max(found["before"], found["across"], found["after"]) < TOLERANCE
    assert found["versions"] == [0, 1] and found["apart"] > 10 * TOLERANCE


def members(session: int) -> list[str]:
    """Names of the processes of a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session:
                found.append(process.name())
    return found
