"""The chaos test's nemesis: real processors on a broker of their own, killed, frozen and cut off while work is under way.

    python -m support.chaos --seed 7 [--plant BUG]      # from tests/: one small run, its findings and counts

What happens, and in which order, follows from the seed; when it happens follows from how far the producer is.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from consumers.components import make_recipe
from infra.embedded import servers
from infra.kafka_log import KafkaLog
from infra.log import Log
from infra.provision import topic_specs
from infra.settings import EmbeddedTable, Settings
from support import chaos_check
from support.chaos_plan import GROUP_SIZE, make_plan
from support.chaos_processes import process, produce
from support.relay import Relay
from support.servers import kept_state

CONTEXT = multiprocessing.get_context("forkserver")
MIN_MEMBERS = 2
PARTITIONS = 3


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """One run, replayable by its seed."""

    seed: int
    num_trajectories: int = 160
    num_kills: int = 8
    num_broker_kills: int = 0
    policies: tuple[str, ...] = ("main",)
    processors: int = 2
    """Of each policy."""
    plant: str = ""
    lossy: float = 0.02
    """Share of sends that a processor is not answered."""
    rest_s: tuple[float, float] = (0.3, 1.6)
    """Between two kills: a processor that never gets to work shows nothing."""
    drain_s: float = 60.0


@dataclass
class Report:
    """What was found wrong, and what happened."""

    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@contextmanager
def own_broker(kafka_version: str = "4.2.2") -> Iterator[EmbeddedTable]:
    """A broker that may be killed, in a folder of its own."""
    with kept_state("offsetrl-chaos-") as state:
        table = EmbeddedTable(state=state, kafka_version=kafka_version, heap_mb=256)
        servers.up(table, "none", only=(servers.KAFKA,))
        yield table


def run_chaos(chaos: Chaos, table: EmbeddedTable) -> Report:
    """One run on a broker that is up; leaves no process behind."""
    with Relay() as relay, tempfile.TemporaryDirectory(prefix="offsetrl-chaos-run-") as folder:
        nemesis = Nemesis(chaos, table, relay, Path(folder))
        try:
            return nemesis.run()
        finally:
            nemesis.end()


class Nemesis:
    """The processes of one run, and what is done to them."""

    def __init__(self, chaos: Chaos, table: EmbeddedTable, relay: Relay, folder: Path) -> None:
        self.chaos, self.table, self.relay, self.folder = chaos, table, relay, folder
        self.rng = random.Random(f"nemesis/{chaos.seed}")
        self.report = Report()
        bootstrap = servers.endpoints(table.state, (servers.KAFKA,)).bootstrap_servers
        self.run_name = f"chaos-{chaos.seed}-{time.time_ns() % 10**9}"
        self.settings = _settings(self.run_name, chaos.policies, bootstrap, relay.socks_url)
        # Closed while brokers die: the client leaves sockets of refused connections to the garbage collector.
        first = KafkaLog(bootstrap)
        first.create(topic_specs(Settings.model_validate(self.settings)))
        first.close()
        self.log: Log = KafkaLog(bootstrap)
        self.plan = make_plan(
            chaos.seed, self.run_name, list(chaos.policies), num_trajectories=chaos.num_trajectories,
            num_partitions=PARTITIONS, now_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip
        self.allowed, self.acked = CONTEXT.Value("q", 0), CONTEXT.Value("q", 0)
        self.starts = itertools.count()
        self.alive: dict[tuple[str, int], ForkServerProcess] = {}
        self.frozen: list[tuple[float, int]] = []
        self.producer: ForkServerProcess | None = None

    def run(self) -> Report:
        """Produce and disturb, let everything drain, end politely, check."""
        CONTEXT.set_forkserver_preload(["support.chaos_processes"])
        self.producer = CONTEXT.Process(
            target=produce,
            args=(self.settings, self.plan, str(self.journal), self.allowed, self.acked),
            daemon=True,
        )
        assert self.producer is not None
        self.producer.start()
        self._allow(len(self.plan) // 10)  # some records stand before anybody reads
        for policy in self.chaos.policies:
            for number in range(self.chaos.processors):
                self._start(policy, number)
        self._disturb()
        self._allow(len(self.plan))
        self._drain()
        self._stop_politely()
        self._check()
        return self.report

    @property
    def journal(self) -> Path:
        """What was sent and acknowledged, kept outside the system."""
        return self.folder / "journal"

    def end(self) -> None:
        """No process is left."""
        for one in [*self.alive.values(), *([self.producer] if self.producer else [])]:
            if one.pid is not None and one.is_alive():
                os.kill(one.pid, signal.SIGKILL)
            one.join(10)
        self.log.close()

    def _start(self, policy: str, number: int) -> None:
        name = f"p{number}"
        seed = self.chaos.seed * 1000 + next(self.starts)
        args = (
            self.settings, policy, name, str(self.folder / f"{policy}-{name}.log"), seed, self._processor_bug(),
            self.chaos.lossy,
        )  # fmt: skip
        started: Any = CONTEXT.Process(target=process, args=args, daemon=True)
        started.start()
        self.alive[policy, number] = started

    def _processor_bug(self) -> str:
        return "" if self.chaos.plant == "chain-not-checked" else self.chaos.plant

    def _disturb(self) -> None:
        """Kills, with freezes and cuts between them, spread over the producing."""
        chaos, total = self.chaos, self.chaos.num_kills
        broker_kills = set(self.rng.sample(range(total), chaos.num_broker_kills))
        freezes, cuts = (set(self.rng.sample(range(total), max(1, total // share))) for share in (5, 3))
        for turn in range(total):
            self._allow(len(self.plan) * (turn + 2) // (total + 2), wait=False)
            self._rest(self.rng.uniform(*chaos.rest_s))
            if turn in freezes:
                self._freeze()
            if turn in cuts:
                self.relay.cut()
                self.report.counts["cuts"] += 1
            if turn in broker_kills:
                self._kill_broker()
            else:
                self._kill_processor()

    def _allow(self, upto: int, wait: bool = True) -> None:
        """Let the producer send that far, and wait until it is all acknowledged."""
        self.allowed.value = max(self.allowed.value, upto)
        deadline_s = time.monotonic() + 120
        while self.acked.value < upto - (0 if wait else len(self.plan) // 5):
            assert time.monotonic() < deadline_s, f"the producer stands at {self.acked.value} of {upto}"
            self._rest(0.01)

    def _rest(self, seconds: float) -> None:
        """Wait; meanwhile thaw what was frozen long enough, and start again what ended by itself."""
        until_s = time.monotonic() + seconds
        while True:
            now_s = time.monotonic()
            for entry in [entry for entry in self.frozen if entry[0] <= now_s]:
                self.frozen.remove(entry)
                os.kill(entry[1], signal.SIGCONT)
            for (policy, number), one in list(self.alive.items()):
                if one.exitcode is not None:
                    self.report.counts[f"ended by itself with {one.exitcode}"] += 1
                    self._start(policy, number)
            if now_s >= until_s:
                return
            time.sleep(min(0.02, until_s - now_s))

    def _kill_processor(self) -> None:
        key = self.rng.choice(sorted(self.alive))
        victim = self.alive[key]
        assert victim.pid is not None
        self.frozen = [entry for entry in self.frozen if entry[1] != victim.pid]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        self.report.counts["processors killed"] += 1
        self._start(*key)

    def _freeze(self) -> None:
        victim = self.alive[self.rng.choice(sorted(self.alive))]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGSTOP)
        self.frozen.append((time.monotonic() + self.rng.uniform(0.5, 4.0), victim.pid))
        self.report.counts["frozen"] += 1

    def _kill_broker(self) -> None:
        found = next(one for one in servers.status(self.table.state) if one.name == servers.KAFKA)
        assert found.pid is not None
        os.kill(found.pid, signal.SIGKILL)
        self.report.counts["brokers killed"] += 1
        self._rest(self.rng.uniform(0.0, 1.0))
        servers.up(self.table, "none", only=(servers.KAFKA,))

    def _drain(self) -> None:
        """Wait until everything that must come has come; what has not by then is found by the check."""
        for _, pid in self.frozen:
            os.kill(pid, signal.SIGCONT)
        self.frozen.clear()
        recipe = _recipe()
        self.expected = {
            policy: chaos_check.replay(self.log, self.run_name, policy, recipe) for policy in self.chaos.policies
        }
        waiting, deadline_s = set(self.chaos.policies), time.monotonic() + self.chaos.drain_s
        while waiting and time.monotonic() < deadline_s:
            self._rest(0.3)
            waiting = {
                policy
                for policy in waiting
                if not chaos_check.is_drained(self.log, self.run_name, policy, self.expected[policy])
            }
        self.report.findings += [f"{policy}: not everything came within {self.chaos.drain_s:g} s" for policy in waiting]

    def _stop_politely(self) -> None:
        for key, one in self.alive.items():
            one.terminate()
            one.join(20)
            if one.exitcode != 0:
                self.report.findings.append(f"{key}: ended with {one.exitcode} when asked to stop")

    def _check(self) -> None:
        report, counts = self.report, self.report.counts
        checks_chain = self.chaos.plant != "chain-not-checked"
        for policy, expected in self.expected.items():
            report.findings += chaos_check.check_policy(
                self.log, self.run_name, policy, expected, counts, checks_chain=checks_chain
            )
        report.findings += chaos_check.check_journal(self.journal, self.plan, self.expected, counts)
        unexpected = {name: count for name, count in counts.items() if name.startswith("ended by itself")}
        if unexpected:
            said = [
                path.read_text()[-1500:]
                for path in sorted(self.folder.glob("*.log"))
                if "Traceback" in path.read_text()
            ]
            report.findings.append(f"processors {unexpected}: {said[:1]}")


def _recipe() -> Any:
    return make_recipe(
        advantage="dr-grpo", group_filters=["zero-spread"], min_members=MIN_MEMBERS, group_size=GROUP_SIZE
    )


def _settings(run: str, policies: tuple[str, ...], bootstrap: str, proxy_url: str) -> dict[str, Any]:
    policy = {
        "model": "none",
        "process": {"advantage": "dr-grpo", "min_members": MIN_MEMBERS, "commit_every_s": 0.1},
        "dispatch": {"group_size": GROUP_SIZE, "heartbeat_timeout_s": 1.5},
        "rollout": {"heartbeat_s": 0.25},
    }
    return {
        "run": {"name": run, "partitions": PARTITIONS, "inboxes": 1},
        "kafka": {"bootstrap_servers": bootstrap, "patience_s": 5.0, "client": {"proxy_url": proxy_url}},
        "policies": {name: policy for name in policies},
    }


def main() -> int:
    """One run by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", default="")
    parser.add_argument("--trajectories", type=int, default=160)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--broker-kills", type=int, default=0)
    given = parser.parse_args()
    chaos = Chaos(
        seed=given.seed, plant=given.plant, num_trajectories=given.trajectories, num_kills=given.kills,
        num_broker_kills=given.broker_kills, drain_s=60.0 if not given.plant else 15.0,
    )  # fmt: skip
    with own_broker() as table:
        began_s = time.monotonic()
        report = run_chaos(chaos, table)
        print(f"{time.monotonic() - began_s:.1f} s", dict(report.counts))
    for finding in report.findings:
        print("FOUND", finding)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
