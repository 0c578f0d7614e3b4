"""`offsetrl replay`: stored trajectories go through a processor and a trainer again, into a derived run.

The source is only read: the derived run has topics, positions and weights of its own, and the live run's positions do
not move. First a processor reads all that stands on the source now; then, if steps are wanted, a trainer eats the
outcomes. Ages are not checked there, since the trajectories are not its own; an off-policy correction is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from infra import preflight, provision, wiring
from infra.audit_command import audit_policy, facts, table
from infra.config import load
from infra.lifecycle import Exit
from infra.log import Log, Place
from infra.ownership import read_record, start_positions
from infra.settings import Settings
from infra.supervisor import ChildSpec, Supervisor
from schemas.errors import DeadlineExceeded, SettingError
from schemas.names import commit_group, topic
from schemas.records import Result
from schemas.rules.ledger import Ledger

_STALL_S = 120.0
_GRACE_S = 40.0
_QUIET_S = 8.0


def command(
    config: Path,
    overrides: Sequence[str],
    *,
    policy: str,
    into: str,
    advantage: str,
    steps: int,
    json_path: Path | None = None,
) -> int:
    """Replay; 0 when the derived run's books close."""
    source = load(config, list(overrides)).settings
    settings_of = [*overrides, f'run.name="{into}"', f'policies.{policy}.source.run="{source.run.name}"']
    settings_of += [f'policies.{policy}.source.policy="{policy}"']
    if advantage:
        settings_of.append(f'policies.{policy}.process.advantage="{advantage}"')
    settings = load(config, settings_of).settings
    if settings.policies[policy].train.correction == "none":
        raise SettingError("a derived run needs an off-policy correction: its trajectories are not the trainer's own")
    preflight.check_services(settings)
    console = Console()
    log = wiring.open_log(settings, client_id="replay")
    try:
        _check_source(log, source, policy)
        provision.ensure(log, settings)
        with Supervisor([]) as supervisor:
            child = _Child(supervisor, config, settings, policy)
            _process(log, settings, policy, source, child, settings_of)
            kept = _num_kept(log, settings, policy)
            batch = settings.policies[policy].train.batch_groups
            wanted = min(steps, kept // batch)
            console.print(f"{kept} groups kept; {wanted} steps of {batch} groups follow", highlight=False)
            if steps and not wanted:
                raise SettingError(
                    f"{kept} kept groups do not fill one batch of {batch}: take a smaller train.batch_groups"
                )
            if wanted:
                _train(log, settings, policy, wanted, child, settings_of)
        found = audit_policy(log, settings, policy)
    finally:
        log.close()
    console.print(table([found]))
    for finding in found.accounts.findings:
        console.print(finding, style="red", markup=False)
    if json_path is not None:
        json_path.write_text(json.dumps(facts(found), indent=2) + "\n")
    return Exit.OK if found.accounts.ok else Exit.FAILED


class _Child:
    """Starts a daemon of the derived run as a child process."""

    def __init__(self, supervisor: Supervisor, config: Path, settings: Settings, policy: str) -> None:
        self.supervisor, self._config, self._policy = supervisor, config, policy
        self._logs = settings.run.folder / "logs" / settings.run.name
        self._logs.mkdir(parents=True, exist_ok=True)

    def start(self, role: str, overrides: Sequence[str]) -> str:
        """Start `offsetrl ROLE`; returns the child's name."""
        name = f"{role}-{self._policy}"
        argv = [sys.executable, "-m", "infra.cli.main", role, "--config", str(self._config), "--policy", self._policy]
        argv += [part for override in overrides for part in ("--set", override)]
        env = {"PYTHONSAFEPATH": "1"}
        self.supervisor.add(ChildSpec(name=name, argv=argv, env=env, log_path=self._logs / f"{name}.log"))
        return name

    def check(self, name: str) -> None:
        """Raise SettingError with the child's last words when it has ended for good."""
        if code := self.supervisor.finished().get(name):
            raise SettingError(f"{name} ended with code {code}:\n{self.supervisor.tail(name)}")

    def end(self, name: str) -> None:
        """Tell it to drain."""
        self.supervisor.terminate([name], _GRACE_S)


def _check_source(log: Log, source: Settings, policy: str) -> None:
    name = topic(source.run.name, policy, "trajectories")
    if name not in log.topics():
        raise SettingError(f"there is no topic {name}: nothing to replay; check run.name and --policy")
    if not any(bounds.end > bounds.start for bounds in log.bounds(name).values()):
        raise SettingError(f"{name} holds no records: nothing to replay")


def _process(
    log: Log, settings: Settings, policy: str, source: Settings, child: _Child, overrides: Sequence[str]
) -> None:
    """Run a processor until it has committed the present ends of the source, or as far as open groups let it."""
    name = topic(source.run.name, policy, "trajectories")
    ends = {Place(name, partition): bounds.end for partition, bounds in log.bounds(name).items()}
    group = commit_group(settings.run.name, policy, "process")
    process = child.start("process", overrides)
    before, moved = (-1, -1), time.monotonic()
    while True:
        time.sleep(0.2)
        child.check(process)
        stored = log.committed(group, ends)
        if all(place in stored and stored[place].offset >= end for place, end in ends.items()):
            break
        samples = sum(b.end for b in log.bounds(topic(settings.run.name, policy, "samples")).values())
        now = (sum(entry.offset for entry in stored.values()), samples)
        if now != before:
            before, moved = now, time.monotonic()
        if len(stored) == len(ends) and time.monotonic() - moved > _QUIET_S:
            break  # groups that never closed hold the position back; they are pending in the accounts
        if time.monotonic() - moved > _STALL_S:
            raise DeadlineExceeded(f"the processor has not moved for {_STALL_S:g} s while reading {name}")
    child.end(process)


def _num_kept(log: Log, settings: Settings, policy: str) -> int:
    """Kept outcomes that no plan has named."""
    found = audit_policy(log, settings, policy)
    return len(found.waiting_outcomes)


def _train(log: Log, settings: Settings, policy: str, wanted: int, child: _Child, overrides: Sequence[str]) -> None:
    name = topic(settings.run.name, policy, "steps")
    reader = log.reader(start_positions(log, [name]))
    ledger = Ledger()
    limits = [f"policies.{policy}.train.{limit}" for limit in (f"steps={wanted}", "tokens=0", "hours=0.0")]
    train = child.start("train", [*overrides, *limits])
    moved = time.monotonic()
    try:
        while ledger.steps_done < wanted:
            child.check(train)
            for envelope in reader.poll(0.2):
                record = read_record(envelope)
                if ledger.take(envelope.offset, record, envelope.time_ms) and isinstance(record, Result):
                    moved = time.monotonic()
            if time.monotonic() - moved > _STALL_S:
                raise DeadlineExceeded(f"no step for {_STALL_S:g} s; {ledger.steps_done} of {wanted} are done")
    finally:
        reader.close()
    child.end(train)
