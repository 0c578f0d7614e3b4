"""Real workers that leave in the middle of episodes: one by SIGTERM, one by SIGKILL; others go on behind the last token."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import wiring
from infra.config import load
from infra.log import Log, Place
from infra.ownership import read_all, read_record
from infra.provision import ensure
from infra.store import ObjectStore
from infra.weights.announce import announcer, take_over
from infra.weights.publish import model_files, publish
from schemas.names import topic
from schemas.packing import unpack_ints
from schemas.records import Claim, Partial, Record, Trajectory
from support.demo import LIMIT_S, Home, environment

pytestmark = [pytest.mark.prove, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

RUN, POLICY = "handed", "alpha"
SETS = (
    f'run.name="{RUN}"',
    f"policies.{POLICY}.sampling.max_tokens=40",
    f"policies.{POLICY}.dispatch.group_size=4",
    f"policies.{POLICY}.dispatch.capacity_groups=4",
    f"policies.{POLICY}.train.batch_groups=1000",  # nothing trains here, so that much may be asked for
    f"policies.{POLICY}.dispatch.heartbeat_timeout_s=4",
    f"policies.{POLICY}.dispatch.lifetime_s=240",
    f"policies.{POLICY}.dispatch.reissue_after_s=120",
    f'policies.{POLICY}.rollout.engine="support.rollout_scene:long_engine"',
    f"policies.{POLICY}.rollout.engine_settings={{step_s=0.1, vocab_size=64}}",
    f"policies.{POLICY}.rollout.max_model_len=64",
    f"policies.{POLICY}.rollout.partial_tokens=8",
    f"policies.{POLICY}.rollout.drain_s=0",
)


class Daemons:
    """The run's daemons, started and ended by the test."""

    def __init__(self, home: Home) -> None:
        self.home, self.config = home, home.folder / "first.toml"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, name: str) -> None:
        line = ["--config", str(self.config), "--policy", POLICY, "--name", name]
        for entry in SETS:
            line += ["--set", entry]
        with self._output(name).open("wb") as output:
            self.processes[name] = subprocess.Popen(
                self.home.arguments(role, *line), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self.home.folder, env=environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
            )  # fmt: skip

    def start_serving(self, name: str) -> None:
        """Start a worker and wait until it takes requests, so that unfinished episodes need not wait for it."""
        self.start("rollout", name)
        self.until(lambda: "serving" in self._output(name).read_text(), f"{name} to serve")

    def until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not there():
            said = "\n".join(f"--- {name}\n" + self._output(name).read_text()[-1500:] for name in self.processes)
            assert time.monotonic() < deadline, f"waited for {what}\n{said}"
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(30)

    def _output(self, name: str) -> Path:
        return self.home.folder / f"{RUN}-{name}.out"


@pytest.fixture
def daemons(served: Home) -> Iterator[Daemons]:
    found = Daemons(served)
    yield found
    found.end()


def _publish(log: Log, store: ObjectStore, model: Path) -> None:
    """Version 0, as a trainer would; none runs here, so it stays the only one."""
    claim = Claim(run=RUN, policy=POLICY, role="train", epoch=1, nonce="0")
    take_over(log, claim, timeout_s=LIMIT_S)
    publish(
        store, announcer(log, timeout_s=LIMIT_S), run=RUN, policy=POLICY, epoch=1, nonce="0", version=0, step=0,
        files=model_files(model), parent=None,
    )  # fmt: skip


def _records(log: Log, kind: str) -> list[Record]:
    name = topic(RUN, POLICY, kind)
    if name not in log.topics():
        return []
    return [
        record
        for partition, bounds in log.bounds(name).items()
        for envelope in read_all(log, Place(name, partition), bounds)
        if (record := read_record(envelope)) is not None
    ]


def test_unfinished_episodes_go_on_elsewhere_from_the_last_token(daemons: Daemons) -> None:
    settings = load(daemons.config, SETS).settings
    log = wiring.open_log(settings, client_id="tests")
    try:
        ensure(log, settings)
        _publish(log, wiring.open_store(settings), daemons.home.folder / settings.policies[POLICY].model)
        for role in ("dispatch", "process"):
            daemons.start(role, role)
        daemons.start("rollout", "w0")

        def left_by(worker: str) -> list[Partial]:
            found = _records(log, "partials")
            return [one for one in found if isinstance(one, Partial) and one.worker == worker]

        def resumed_by(worker: str) -> list[Trajectory]:
            found = _records(log, "trajectories")
            mine = [one for one in found if isinstance(one, Trajectory) and one.worker == worker]
            return [one for one in mine if one.resumed_tokens]

        daemons.until(lambda: len(left_by("w0")) >= 8, "chunks of the first worker")
        daemons.start_serving("w1")
        daemons.processes["w0"].send_signal(signal.SIGTERM)
        assert daemons.processes["w0"].wait(60) == 0
        daemons.until(lambda: bool(resumed_by("w1")), "an episode of the first worker that the second one finished")
        daemons.until(lambda: len(left_by("w1")) >= 8, "chunks of the second worker")
        daemons.start_serving("w2")
        daemons.processes["w1"].send_signal(signal.SIGKILL)
        daemons.until(lambda: bool(resumed_by("w2")), "an episode of the killed worker that the third one finished")
        for found in (*resumed_by("w1"), *resumed_by("w2")):
            tokens = unpack_ints(found.tokens).tolist()
            first = found.segments[0].count
            assert tokens[first:] == [at % 2 for at in range(first, len(tokens))], "none twice, none missing"
            assert len(tokens) - first == 40 and found.attempt > 0
            chunks = [one for one in _records(log, "partials") if isinstance(one, Partial)]
            mine = [one for one in chunks if (one.group, one.index) == (found.group, found.index)]
            assert found.resumed_tokens <= max(one.end for one in mine) - first
    finally:
        log.close()
