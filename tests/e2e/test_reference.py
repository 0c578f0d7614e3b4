"""Without staleness the whole system is plain synchronous training: the same weights after each step, bit for bit.

All daemons are the real ones with the real learner, as threads over a log in memory, with the scripted engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import consumers.processor
import producers.dispatcher
import producers.rollout_worker
import trainers.trainer
from infra import wiring
from infra.audit import audit
from infra.config import load
from infra.daemon import Daemon
from infra.lifecycle import Stop
from infra.log import Log, Place
from infra.memory_store import MemoryStore
from infra.ownership import read_all, read_record
from infra.settings import Settings
from reference_loop import Plain, digests
from schemas.names import topic
from schemas.records import KEPT, Outcome, Result
from support.demo import Finished, Home
from support.loop import POLICY, make_daemon, make_log, said
from support.models import model_folder

pytestmark = [pytest.mark.model, pytest.mark.e2e]

STEPS, SEED = 30, 11
TRAIN = {"learning_rate": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def _settings(folder: Path, model: Path, partitions: int) -> Settings:
    policy = {
        "model": str(model),
        "task": {"environment": "sort-digits", "settings": {"digits": 3}},
        "sampling": {"max_tokens": 5},
        "dispatch": {"group_size": 4},
        "rollout": {"engine": "scripted", "max_model_len": 32},
        "process": {"commit_every_s": 0.2},
        "train": {"batch_groups": 3, "max_staleness": 0, "correction": "none", "steps": STEPS, **TRAIN},
    }
    run = {"name": "demo", "seed": SEED, "partitions": partitions, "inboxes": 4, "folder": str(folder)}
    return Settings.model_validate({"run": run, "policies": {POLICY: policy}})


def _run_all(settings: Settings, workers: int) -> list[str]:
    """Every daemon in a thread, until the steps are done; the digests of the steps, from the log."""
    log, store, stop = make_log(settings), MemoryStore(), Stop()
    errors: list[BaseException] = []

    def start(body: Callable[[Daemon], int], name: str) -> threading.Thread:
        def main() -> None:
            try:
                body(make_daemon(log, settings, name=name, store=store, stop=stop))
            except BaseException as error:  # noqa: BLE001  # raised below, in the test's thread
                errors.append(error)

        thread = threading.Thread(target=main, name=name, daemon=True)
        thread.start()
        return thread

    roles = [
        (trainers.trainer.run, "train"),
        (producers.dispatcher.run, "dispatch"),
        (consumers.processor.run, "process"),
    ]
    roles += [(producers.rollout_worker.run, f"worker-{number}") for number in range(workers)]
    threads = [start(body, name) for body, name in roles]
    waited = threading.Event()
    results: list[str] = []
    while len(results) < STEPS and not errors and all(thread.is_alive() for thread in threads):
        waited.wait(0.2)
        results = [record.digest for record in said(log, "steps") if isinstance(record, Result)]
    stop.request()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return results


def _check(folder: Path, workers: int, partitions: int) -> None:
    model = model_folder()
    plain = Plain(
        folder=model, policy=POLICY, seed=SEED, steps=STEPS, batch_groups=3, group_size=4, digits=3, max_tokens=5,
        learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    assert _run_all(_settings(folder, model, partitions), workers) == digests(plain)


@pytest.mark.parametrize(("workers", "partitions"), [(1, 1), (3, 4)])
def test_the_system_gives_the_digests_of_a_plain_loop(workers: int, partitions: int, tmp_path: Path) -> None:
    _check(tmp_path, workers, partitions)


@pytest.mark.prove
@pytest.mark.parametrize(("workers", "partitions"), [(3, 1), (1, 4)])
def test_so_it_does_with_other_numbers(workers: int, partitions: int, tmp_path: Path) -> None:
    _check(tmp_path, workers, partitions)


@pytest.mark.prove
def test_with_vllm_every_trained_token_is_of_its_steps_base_version(served: Home, finished: Finished) -> None:
    """Real processes, a real broker and real swaps: with `max_staleness` 0 a step eats what its own weights sampled."""
    del finished  # its settings file is the one that is changed here
    sets = ['run.name="onpolicy"', "policies.alpha.train.max_staleness=0", "policies.alpha.train.steps=6"]
    sets += ['policies.alpha.rollout.engine="vllm"', 'policies.alpha.train.correction="none"']
    given = [part for entry in sets for part in ("--set", entry)]
    served.command("run", "--config", str(served.folder / "first.toml"), *given).expect()
    log = wiring.open_log(load(served.folder / "first.toml", (*served.sets, *sets)).settings, client_id="tests")
    try:
        found = audit(log, "onpolicy", "alpha", max_tokens=10_000)
        samples = {(place, at): record for place, at, record in _outcomes(log)}
    finally:
        log.close()
    assert found.accounts.ok and found.ledger.steps_done == 6
    trained = list(found.ledger.trained())
    assert len(trained) >= 6
    for step, address in trained:
        kept = [m for m in samples[address.partition, address.offset].members if m.disposition == KEPT]
        assert kept and {run.version for member in kept for run in member.versions} == {step}


def _outcomes(log: Log) -> Iterator[tuple[int, int, Outcome]]:
    name = topic("onpolicy", "alpha", "samples")
    for partition, bounds in log.bounds(name).items():
        for envelope in read_all(log, Place(name, partition), bounds):
            if isinstance(record := read_record(envelope), Outcome):
                yield partition, envelope.offset, record
