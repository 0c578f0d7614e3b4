"""One rank of a test's trainer, as a process of its own: `python rank_main.py SCENE FOLDER`, with RANK in the environment.

Scenes: `gradients` and `shards` (every rank takes the same steps, under DDP or FSDP2, and rank 0 writes what came of
them), `train` (rank 0 runs the real trainer on a log in memory, the others follow it), `die` (as `train`, and the last
rank dies at its second step).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
from accelerate.utils import DistributedType

from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from schemas.errors import RankLost
from support.loop import append, make_daemon, make_log
from support.models import model_folder
from support.points import ledger_of, start_trainer, train
from support.training import CASES, SHARDED_CASES, ranks_settings, rows_of_case, stepper_of_case, training_outcomes
from trainers import trainer
from trainers.acceleration import Accelerator, sharding
from trainers.model import tensors_digest
from trainers.ranks import dismissing, join
from trainers.step import Stepper

LIMIT_S = 60.0


def gradients(folder: Path, *, shards: bool = False) -> None:
    """Each case's gradients and figures."""
    model_folder(), model_folder(seed=1)  # beforehand: once they have met, transformers writes models on rank 0 alone
    ranks = join(LIMIT_S)
    found: dict[str, Any] = {}
    accelerator = sharding_on_cpus() if shards else None
    for name in SHARDED_CASES if shards else CASES:
        case = CASES[name]
        stepper = stepper_of_case(case, accelerator)
        figures = stepper.execute(rows_of_case(case), step=0, seed=0).as_dict()
        tensors = {name: tensor.clone() for name, tensor in stepper.tensors()["optimizer"].items()}
        found[name] = {"figures": figures, "digest": tensors_digest(stepper.weights()), "again": taken_again(stepper)}
        if ranks.rank == 0:
            kept = {k: v.contiguous() for k, v in tensors.items() if k.endswith("exp_avg")}
            safetensors.torch.save_file(kept, folder / name)
    (folder / f"figures-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.leave()


def sharding_on_cpus() -> Accelerator:
    """accelerate's FSDP2 over gloo: it shards over accelerators alone, though torch can do so over CPUs."""
    found = Accelerator(cpu=True)
    found.state.distributed_type, found.state.fsdp_plugin = DistributedType.FSDP, sharding()
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
    """The real trainer on rank 0 over a log in memory."""
    settings = ranks_settings(folder, ranks=int(os.environ["WORLD_SIZE"]))
    log: MemoryLog = make_log(settings)
    daemon = make_daemon(log, settings)
    if os.environ["RANK"] != "0":
        if dies:
            _die_at(2)
        trainer.follow(daemon)
        return
    for partition in (0, 1):
        append(log, "samples", *training_outcomes(partition), partition=partition)
    store = MemoryStore()
    with dismissing():
        for steps in (2, settings.policies["main"].train.steps):  # the second trainer of this process begins anew
            train(start_trainer(log, store, settings, lambda name: None), steps)
    digests = [result.digest for result in ledger_of(log).results]
    (folder / "digests.json").write_text(json.dumps(digests))


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
        else:
            run_train(folder, dies=scene == "die")
    except RankLost as error:
        sys.stderr.write(f"RankLost: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
