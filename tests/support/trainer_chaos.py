"""Real trainers over stored samples on a real broker and a real store, that kill or freeze themselves at a named point.

Every write is a point (`support.points`); the process counts them, notes the name, and ends itself with a signal.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from infra import wiring
from infra.daemon import Daemon, edge
from infra.kafka_log import KafkaLog
from infra.lifecycle import Stop, die_with_parent
from infra.log import Log, Place
from infra.ownership import read_all, read_record
from infra.provision import topic_specs
from infra.settings import Settings
from schemas.codec import encode
from schemas.names import topic
from schemas.records import Outcome
from schemas.rules.ledger import Ledger
from support.outcomes import make_outcome
from support.points import PointLog, PointStore
from support.training import make_member
from trainers import checkpoint, learner, trainer

CONTEXT = multiprocessing.get_context("forkserver")
POLICY = "main"
assert learner  # imported once by the fork server, so that children start at once
_CHECKPOINT_POINTS = ("_write_all", "_rename", "_remove_old")


def settings_for(folder: Path, model: Path, bootstrap: str, s3: Any, *, run: str, steps: int) -> dict[str, Any]:
    """Settings of a run over stored samples; equal for every run but for its name and its folder."""
    train = {"batch_groups": 2, "max_staleness": steps, "steps": steps, "checkpoint_every": 2, "learning_rate": 1e-3}
    return {
        "run": {"name": run, "seed": 3, "partitions": 2, "folder": str(folder)},
        "kafka": {"bootstrap_servers": bootstrap},
        "s3": {"endpoint_url": s3.url, "bucket": s3.bucket, "access_key": s3.access_key, "secret_key": s3.secret_key},
        "policies": {POLICY: {"model": str(model), "train": train, "rollout": {"max_model_len": 64}}},
    }


def store_samples(log: Log, settings: Settings, count: int) -> None:
    """`count` kept groups of two members, one after the other, so that every run plans them in the same order."""
    rng, last = random.Random(7), {0: -1, 1: -1}
    log.create(topic_specs(settings))
    writer, name = log.writer(), settings.run.name
    for number in range(count):
        partition = number % 2
        previous, last[partition] = last[partition], last[partition] + 3
        record = _outcome(name, number, partition, previous, rng)
        writer.send(topic(name, POLICY, "samples"), partition, encode(record)).result(20.0)
        time.sleep(0.002)  # append times are in milliseconds, and decide the order between partitions
    writer.close()


def _outcome(run: str, number: int, partition: int, previous: int, rng: random.Random) -> Outcome:
    closing = previous + 3
    plain = make_outcome(
        group=f"g{number:08d}", closing_offset=closing, previous=previous, partition=partition, version=(1, 0)
    )
    members = tuple(
        make_member(
            [rng.randrange(2, 20) for _ in range(8)], [0, 0, 0, 1, 1, 1, 1, 1], index=index, offset=closing - 1 + index,
            advantage=1.0 - 2 * index, logprobs=[-3.0] * 5, reward=float(1 - index),
        )
        for index in (0, 1)
    )  # fmt: skip
    return Outcome(
        **{f: getattr(plain, f) for f in Outcome.__dataclass_fields__ if f not in ("members", "run", "source_run")},
        members=members, run=run, source_run=run,
    )  # fmt: skip


def start(settings: dict[str, Any], at: int, how: signal.Signals, notes: Path, output: Path) -> ForkServerProcess:
    """A trainer that sends itself a signal at its `at`-th point; -1 for never."""
    CONTEXT.set_forkserver_preload(["support.trainer_chaos"])
    args = (settings, at, int(how), str(notes), str(output))
    process: Any = CONTEXT.Process(target=_main, args=args, daemon=True)
    process.start()
    return cast(ForkServerProcess, process)


def _main(settings: dict[str, Any], at: int, how: int, notes: str, output: str) -> None:
    die_with_parent()
    with Path(output).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        if name.endswith("Heartbeat"):
            return  # comes by the clock, and a seed has to give the same points
        if seen == at:
            with Path(notes).open("a") as book:
                book.write(name + "\n")
            os.kill(os.getpid(), how)
        seen += 1

    _checkpoint_points(hook)
    loaded = Settings.model_validate(settings)
    log = cast(Log, PointLog(cast(Any, wiring.open_log(loaded, "train-chaos")), hook))
    store = cast(Any, PointStore(cast(Any, wiring.open_store(loaded, "")), hook))
    stop = Stop()
    stop.install()
    sys.exit(edge(lambda: trainer.run(Daemon(loaded, POLICY, "train", "", log, store, stop))))


def _checkpoint_points(hook: Callable[[str], None]) -> None:
    for name in _CHECKPOINT_POINTS:
        real = getattr(checkpoint, name)

        def wrapped(*args: Any, _real: Callable[..., Any] = real, _name: str = name, **kwargs: Any) -> Any:
            hook(f"before checkpoint {_name}")
            done = _real(*args, **kwargs)
            hook(f"after checkpoint {_name}")
            return done

        setattr(checkpoint, name, wrapped)


def ledger_of(log: KafkaLog, run: str) -> Ledger:
    """What counts on `steps`, from the log alone."""
    ledger, place = Ledger(), Place(topic(run, POLICY, "steps"), 0)
    for envelope in read_all(log, place, log.bounds(place.topic)[0]):
        ledger.take(envelope.offset, read_record(envelope), envelope.time_ms)
    return ledger


def facts(log: KafkaLog, run: str) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Digest of the weights after each step, and (step, partition, closing offset) of everything trained."""
    ledger = ledger_of(log, run)
    trained = [(step, address.partition, address.closing_offset) for step, address in ledger.trained()]
    return [result.digest for result in ledger.results], sorted(trained)
