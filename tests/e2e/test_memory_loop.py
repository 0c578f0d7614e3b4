"""The whole loop on a log in memory, killed, frozen, doubled and cut off at any point; afterwards the books close.

Every daemon is the real one; only the engine's answers, the learner's arithmetic, hearts and clocks are stand-ins
(support.simulation). What must hold at every moment is asserted by support.watcher, record by record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.audit import Audit, audit
from infra.ownership import Ownership
from infra.weights.fetch import load_manifest
from producers.dispatch_state import DispatchState
from producers.outbox import Outbox
from schemas.errors import DeadlineExceeded, Superseded
from schemas.records import Address, Plan, Result
from schemas.rules.chain import NONE, ReadBack
from schemas.rules.partition import PartitionState
from support.loop import POLICY, RUN
from support.processor_scenes import records
from support.silence import silence
from support.simulation import Simulation, install, step_digest
from trainers.own_ledger import OwnLedger


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with silence():
        yield


def simulate(seed: int, folder: Path, *, num_faults: int = 14, **tables: Any) -> Simulation:
    """One run with faults, drained and checked."""
    sim = Simulation(seed, folder, **tables)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, sim)
        try:
            sim.run(num_faults)
            check(sim)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\nfaults: {'; '.join(sim.happened)}") from error
    return sim


def check(sim: Simulation) -> Audit:
    """What must hold after the drain, from the log alone."""
    found = audit(sim.log, RUN, POLICY, max_tokens=10_000)
    accounts = found.accounts
    assert accounts.ok, accounts.findings
    assert (accounts.pending, accounts.unaccounted, accounts.twice) == (0, 0, 0), accounts
    train = sim.settings.policies[POLICY].train
    limit = found.ledger.ended(train.stop_at)
    assert limit and found.ledger.steps_done == found.ledger.steps_planned
    assert limit != "steps" or found.ledger.steps_done == train.steps
    assert min(0, found.ledger.steps_done - 1) <= found.max_staleness_seen <= train.max_staleness
    check_digests(sim)
    check_outboxes(sim)
    return found


def check_digests(sim: Simulation) -> None:
    """Each result is what a replay of its plan from the log gives, and the newest version holds the last one."""
    ledger, outcomes, weights = sim.watcher.ledger, sim.watcher.outcomes, bytes(32)
    for (_, plan), result in zip(ledger.plans, ledger.results, strict=True):
        eaten = [outcomes[(a.partition, a.closing_offset)] for a in plan.samples]
        weights = step_digest(weights, plan, eaten)
        assert result.digest == weights.hex(), f"step {plan.step} has another digest than its replay"
    head = sim.watcher.heads.head
    assert head is not None and head.name.version == ledger.steps_done
    manifest = load_manifest(sim.store, RUN, POLICY, head.name, head.digest)
    entry = next(entry for entry in manifest.files if entry.name == "model.safetensors")
    blob = sim.store.get(f"{RUN}/{POLICY}/blobs/{entry.sha256}")
    assert blob.endswith(weights)


def check_outboxes(sim: Simulation) -> None:
    """What a worker finished stands on the log, unless the worker was killed."""
    there = {envelope.value for envelope in records(sim.log, f"{RUN}.{POLICY}.trajectories")}
    for process in sim.processes:
        if process.role == "rollout" and not process.killed:
            assert set(process.finished) <= there, f"worker {process.name} lost a trajectory that it had finished"


@pytest.mark.parametrize("seed", range(5))
def test_books_close_after_any_faults(seed: int, tmp_path: Path) -> None:
    simulate(seed, tmp_path)


@pytest.mark.prove
def test_books_close_after_any_faults_of_many_seeds(tmp_path: Path) -> None:
    for seed in range(1000, 1300):
        simulate(seed, tmp_path, num_faults=30)


def test_an_undisturbed_run_needs_no_repeats(tmp_path: Path) -> None:
    sim = Simulation(1, tmp_path)
    sim.faults = False
    with pytest.MonkeyPatch.context() as patch:
        install(patch, sim)
        sim.run(0)
        found = check(sim)
    counts = sim.watcher.counts
    for name in ("void requests", "repeated outcomes", "asked once more", "close lifetime", "close stray"):
        assert counts[name] == 0, name
    assert found.accounts.superseded == found.accounts.late == 0


def test_synchronous_training_gets_through(tmp_path: Path) -> None:
    simulate(3, tmp_path, train={"max_staleness": 0, "correction": "none"})


def test_publishing_every_second_step_gets_through(tmp_path: Path) -> None:
    simulate(4, tmp_path, train={"publish_every": 2})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, 20))])
@pytest.mark.parametrize("limits", [{"tokens": 60}, {"hours": 4 / 3600}], ids=str)
def test_a_run_that_ends_by_tokens_or_hours_ends_whole_after_any_faults(
    seed: int, limits: dict[str, Any], tmp_path: Path
) -> None:
    sim = simulate(seed, tmp_path, train={"steps": 0, "publish_every": 2, **limits})
    plans = [entry for _, entry in sim.watcher.ledger.plans]
    tokens = [sum(loss_mask_ones(sim, a) for a in entry.samples) for entry in plans]
    assert [entry.num_tokens for entry in plans] == tokens
    if "tokens" in limits:
        assert sum(tokens[:-1]) < limits["tokens"] <= sum(tokens)


def loss_mask_ones(sim: Simulation, address: Address) -> int:
    outcome = sim.watcher.outcomes[(address.partition, address.closing_offset)]
    return sum(int.from_bytes(member.loss_mask, "little").bit_count() for member in outcome.members)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    one, two = simulate(7, tmp_path), simulate(7, tmp_path)
    assert one.happened == two.happened
    assert [r.digest for r in one.watcher.ledger.results] == [r.digest for r in two.watcher.ledger.results]


def test_faults_really_happen(tmp_path: Path) -> None:
    """Without superseded processes and repeated records, the tests above would prove nothing."""
    counts: Counter[str] = Counter()
    for seed in range(6):
        sim = simulate(seed, tmp_path, num_faults=30)
        counts += sim.watcher.counts
        counts.update(f"superseded {process.role}" for process in sim.processes if process.code == 4)
    for name in ("repeated outcomes", "asked once more", "superseded train", "superseded dispatch"):
        assert counts[name], name


# Planted bugs --------------------------------------------------------------------------------------------------------


def _forget_groups(patch: pytest.MonkeyPatch) -> None:
    real = DispatchState.caught_up

    def forgetful(self: DispatchState, now_s: float, **known: Any) -> None:
        real(self, now_s, **known)
        self.groups.clear()

    patch.setattr(DispatchState, "caught_up", forgetful)


def _no_rereading(patch: pytest.MonkeyPatch) -> None:
    def append(self: OwnLedger, record: Plan | Result) -> None:
        from schemas.codec import encode

        ack = self._writer.send(self.topic, 0, encode(record)).result(30.0)
        self.ledger.take(ack.offset, record, 0)
        self._reader.seek(self._place, ack.offset + 1)

    patch.setattr(OwnLedger, "append", append)


def _executed_though_superseded(patch: pytest.MonkeyPatch) -> None:
    real, saw = OwnLedger.append, Ownership.saw

    def append(self: OwnLedger, record: Plan | Result) -> None:
        try:
            real(self, record)
        except Superseded:
            if isinstance(record, Plan):
                self.ledger.plans.append((10**6, record))

    def overlook(self: Ownership, envelope: Any, claim: Any) -> None:
        try:
            saw(self, envelope, claim)
        except Superseded:
            if self.role != "train":
                raise

    patch.setattr(OwnLedger, "append", append)
    patch.setattr(Ownership, "saw", overlook)


def _commit_all(patch: pytest.MonkeyPatch) -> None:
    def committable(self: PartitionState[Any]) -> tuple[int, ReadBack]:
        return self.position, ReadBack(0, NONE)

    patch.setattr(PartitionState, "committable", committable)


def _drop_failed(patch: pytest.MonkeyPatch) -> None:
    real = Outbox._start_over

    def start_over(self: Outbox, error: Exception) -> None:
        if self._sent:
            self._sent.popleft()
        real(self, error)

    patch.setattr(Outbox, "_start_over", start_over)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "dispatcher forgets running groups after a restart": _forget_groups,
    "trainer does not read the ledger before it executes": _no_rereading,
    "trainer executes a plan though superseded": _executed_though_superseded,
    "processor commits everything": _commit_all,
    "outbox drops a failed record": _drop_failed,
}


OFTEN = "processor commits everything"
"""The bug that every `make test` plants; `make prove` plants them all."""


@pytest.mark.parametrize("bug", [OFTEN, *(pytest.param(bug, marks=pytest.mark.prove) for bug in BUGS if bug != OFTEN)])
def test_each_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    for seed in range(40):
        try:
            simulate(seed, tmp_path, num_faults=25)
        except (AssertionError, DeadlineExceeded):
            return
    raise AssertionError(f"{bug}: not noticed in 40 runs")
