"""One rank of a test's trainer, as a process of its own: `python rank_main.py SCENE FOLDER`, with RANK in the environment.

Scenes: `gradients` and `shards` (every rank takes the same steps, under DDP or FSDP2, and rank 0 writes what came of
them), `train` (rank 0 runs the real trainer on a log in memory, the others follow it), `die` (as `train`, and the last
rank dies at its second step), `absent` (a rank that this one has started ends before they have met).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
from accelerate.utils import DistributedType

from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from infra.train_settings import TrainTable
from schemas.errors import RankLost
from support.loop import append, make_daemon, make_log
from support.models import model_folder
from support.points import ledger_of, start_trainer, train
from support.training import (
    CASES,
    SHARDED_CASES,
    gradients_of,
    random_rows,
    ranks_settings,
    rows_of_case,
    stepper_of_case,
    training_outcomes,
)
from trainers import launch, learner, trainer
from trainers.acceleration import Accelerator, sharding
from trainers.crew import StepLeft
from trainers.learner import Learner
from trainers.model import tensors_digest
from trainers.ranks import dismissing, join
from trainers.step import Stepper
from trainers.trainer import Trainer

LIMIT_S = 60.0


def gradients(folder: Path, *, shards: bool = False) -> None:
    """Each case's gradients and figures."""
    model_folder(), model_folder(seed=1)  # beforehand: once they have met, transformers writes models on rank 0 alone
    ranks = join(LIMIT_S)
    found: dict[str, Any] = {}
    for name in SHARDED_CASES if shards else CASES:
        case = CASES[name]
        stepper = stepper_of_case(case, sharding_on_cpus(case.get("dtype", "float32")) if shards else None)
        figures = stepper.execute(rows_of_case(case), step=0, seed=0).as_dict()
        gradients = {name: tensor.clone() for name, tensor in gradients_of(stepper).items()}
        found[name] = {"figures": figures, "digest": tensors_digest(stepper.weights()), "again": taken_again(stepper)}
        found[name]["left"] = left_untouched(stepper)
        if ranks.rank == 0:
            safetensors.torch.save_file({k: v.contiguous() for k, v in gradients.items()}, folder / name)
    (folder / f"figures-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.leave()


def sharding_on_cpus(dtype: str) -> Accelerator:
    """accelerate's FSDP2 over gloo: it shards over accelerators alone, though torch can do so over CPUs."""
    found = Accelerator(cpu=True)
    found.state.distributed_type, found.state.fsdp_plugin = DistributedType.FSDP, sharding(dtype)
    return found


def taken_again(stepper: Stepper) -> bool:
    """Whether a step comes out the same, bit for bit, after the state before it was restored."""
    state = {part: {n: t.clone() for n, t in named.items()} for part, named in stepper.tensors().items()}
    rows, digests = rows_of_case({}), []
    for _ in range(2):
        stepper.restore(state)
        stepper.execute(rows, step=1, seed=1)
        digests.append(tensors_digest(stepper.weights()))
    return digests[0] == digests[1] != tensors_digest(state["model"])


def run_train(folder: Path, *, dies: bool = False) -> None:
    """The real trainer on rank 0 over a log in memory: a run undisturbed, and one whose first trainer is stopped."""
    settings = ranks_settings(folder, ranks=int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] != "0":
        if dies:
            _die_at(2)
        trainer.follow(make_daemon(make_log(settings), settings))
        return
    steps = settings.policies["main"].train.steps
    with dismissing():
        for name, first in (("whole", _two_steps), ("stopped", _stop_in_the_middle)):
            log, store = _log_with_samples(settings), MemoryStore()
            first(start_trainer(log, store, settings, lambda name: None))
            kept = sorted(path.name for path in (folder / "demo" / "main" / "checkpoints").iterdir())
            train(start_trainer(log, store, settings, lambda name: None), steps)  # the second trainer begins anew
            digests = [result.digest for result in ledger_of(log).results]
            (folder / f"{name}.json").write_text(json.dumps({"kept": kept, "digests": digests}))
            (folder / "demo").rename(folder / name)


def left_untouched(stepper: Stepper) -> bool:
    """Whether a step that all ranks leave after one micro-batch leaves every bit of the weights; the last of a stepper."""
    before, asked = tensors_digest(stepper.weights()), [0]

    def between() -> None:
        asked[0] += 1
        if asked[0] == 2:
            raise StepLeft

    with contextlib.suppress(StepLeft):
        stepper.execute(random_rows(12), step=2, seed=2, between=between)
        return asked[0] < 2
    return stepper.clean and tensors_digest(stepper.weights()) == before


def _log_with_samples(settings: Settings) -> MemoryLog:
    log: MemoryLog = make_log(settings)
    for partition in (0, 1):
        append(log, "samples", *training_outcomes(partition), partition=partition)
    return log


def _two_steps(first: Trainer) -> None:
    train(first, 2)


def _stop_in_the_middle(first: Trainer) -> None:
    """Tell a trainer to stop before the second of its two micro-batches of its second step, and let it end."""
    real, grace_s, asked = Learner._leave_in_time, learner.STOP_GRACE_S, [0]

    def ask(self: Learner) -> None:
        asked[0] += 1
        if asked[0] == 4:
            first._daemon.stop.request()
            learner.STOP_GRACE_S = -1.0
        real(self)

    Learner._leave_in_time = ask  # type: ignore[method-assign]  # put back below
    first.take_over()
    while not first._daemon.stop.requested:
        first.turn()
    first.end()
    first.close()
    assert asked[0] == 4, asked
    Learner._leave_in_time, learner.STOP_GRACE_S = real, grace_s  # type: ignore[method-assign]


def meet_who_is_gone() -> None:
    """As rank 0 of two, of which the other ends at once with exit code 7."""
    gone = [sys.executable, "-c", "raise SystemExit(7)"]
    launch._start = lambda rank, shared: subprocess.Popen(gone)  # this process ends with the scene
    with launch.others(TrainTable(ranks=2)):
        join(600.0)


def _die_at(count: int) -> None:
    real, taken = Stepper.execute, [0]

    def execute(self: Stepper, *args: Any, **kwargs: Any) -> Any:
        taken[0] += 1
        if taken[0] == count:
            os._exit(9)
        return real(self, *args, **kwargs)

    Stepper.execute = execute  # type: ignore[method-assign]  # this process ends with the scene


def main(scene: str, folder: Path) -> int:
    """Run a scene; 3 when a rank was lost, with the error on stderr."""
    try:
        if scene in ("gradients", "shards"):
            gradients(folder, shards=scene == "shards")
        elif scene == "absent":
            meet_who_is_gone()
        else:
            run_train(folder, dies=scene == "die")
    except RankLost as error:
        sys.stderr.write(f"RankLost: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # as `offsetrl` does: taken apart in order, threads of gloo now and then abort a process that is done
