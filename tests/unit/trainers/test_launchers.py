"""`offsetrl train` under torchrun and under accelerate launch: the same bits as when it starts its ranks itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.cli.config_commands import toml
from infra.embedded.ports import HOST, find_free
from infra.kafka_log import KafkaLog
from infra.settings import Settings
from support.models import model_folder
from support.servers import ROOT, session_bootstrap, session_s3
from support.trainer_chaos import POLICY, ledger_of, settings_for, store_samples

pytestmark = [pytest.mark.prove, pytest.mark.broker, pytest.mark.s3, pytest.mark.model]

STEPS = 4
LIMIT_S = 240.0
Line = Callable[[int], list[str]]
"""How ranks are started, by the port where they meet; what they are is put behind it."""

LAUNCHERS: dict[str, Line] = {
    "torchrun": lambda port: [
        "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", HOST, "--master-port", str(port), "-m",
    ],
    # Its mixed precision is not followed: what is computed in which type is the settings' business.
    "accelerate": lambda port: [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
        "bf16", "--dynamo_backend", "no", "--main_process_ip", HOST, "--main_process_port", str(port), "-m",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def log() -> Iterator[KafkaLog]:
    log = KafkaLog(session_bootstrap())
    yield log
    log.close()


def digests_of(log: KafkaLog, folder: Path, launcher: list[str], *sets: str) -> list[str]:
    """Digests of a run's steps, trained by the processes of this launcher (none: by `offsetrl train` alone)."""
    run = f"launch-{time.time_ns() % 10**10}"
    settings = settings_for(folder, model_folder(layers=1), session_bootstrap(), session_s3(), run=run, steps=STEPS)
    settings["policies"][POLICY]["train"]["micro_batch_tokens"] = 8
    store_samples(log, Settings.model_validate(settings), 2 * STEPS)
    keys = {f"OFFSETRL_S3__{key.upper()}": settings["s3"].pop(key) for key in ("access_key", "secret_key")}
    config = folder / "run.toml"
    config.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    line = [
        "train",
        "--config",
        str(config),
        "--policy",
        POLICY,
        *(part for entry in sets for part in ("--set", entry)),
    ]
    start = [sys.executable, "-m", *launcher, "infra.cli.main", *line]
    env = os.environ | keys | {"GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "output").open("wb") as output:
        first = subprocess.Popen(start, cwd=ROOT, stdout=output, stderr=output, env=env)
    try:
        _wait(lambda: ledger_of(log, run).steps_done == STEPS, first, folder / "output")
        kin = psutil.Process(first.pid).children(recursive=True)
        assert len(kin) >= 1
        first.send_signal(signal.SIGTERM)
        first.wait(60)
        assert psutil.wait_procs(kin, timeout=60)[1] == [], "ranks end when their launcher is told to stop"
    finally:
        _end(first)
    saved = [path.name for path in (folder / run / POLICY / "checkpoints").iterdir()]
    assert any(f"-{STEPS:08d}-" in name for name in saved), saved
    return [result.digest for result in ledger_of(log, run).results]


def _wait(done: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not done():
        assert process.poll() is None and time.monotonic() < until, output.read_text()[-5000:]
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        kin = psutil.Process(process.pid).children(recursive=True)
        for one in [*kin, psutil.Process(process.pid)]:
            one.kill()
    process.wait(10)


@pytest.fixture(scope="module")
def alone(log: KafkaLog, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks without a launcher come to."""
    found = digests_of(log, tmp_path_factory.mktemp("alone"), [], f"policies.{POLICY}.train.ranks=2")
    assert len(set(found)) == STEPS
    return found


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_s_ranks_take_the_same_steps(log: KafkaLog, tmp_path: Path, alone: list[str], name: str) -> None:
    (port,) = find_free(1)
    assert digests_of(log, tmp_path, LAUNCHERS[name](port)) == alone
