"""accelerate, in one file: one process, DDP over several, or FSDP2 where the settings ask for shards.

DDP and FSDP average gradients over ranks; the step multiplies its loss by the number of ranks, so that they are summed.
What is computed in which type is said by `train.dtype` alone: a launcher's mixed precision is not followed, or one run
would come out differently under another launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from schemas.errors import SettingError
from schemas.names import nearest

__all__ = ["Accelerator", "Tracker", "make_accelerator", "open_trackers", "prepared"]


def make_accelerator(*, shard: bool = False, dtype: str = "float32") -> Accelerator:
    """The accelerator of this process. `shard`: FSDP2 instead of DDP, computing in `dtype`.

    Raises SettingError where it cannot shard.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu = size > 1 and not torch.cuda.is_available()  # several ranks on CPUs are only seen when asked for
    if not shard:
        found = Accelerator(cpu=on_cpu, mixed_precision="no")
        assert found.num_processes == size, (found.num_processes, size)
        return found
    found = Accelerator(cpu=on_cpu, mixed_precision="no", fsdp_plugin=sharding(dtype))
    if found.distributed_type != DistributedType.FSDP:
        raise SettingError(
            f"train.shard is true, but accelerate shards only over several accelerators, and this is "
            f"{found.distributed_type.value} on {found.device.type}: set train.shard = false"
        )
    return found


def sharding(dtype: str = "float32") -> FullyShardedDataParallelPlugin:
    """FSDP2, one shard group per transformer layer; in bfloat16 weights are gathered so, and gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=policy if dtype == "bfloat16" else None,
    )


def prepared(accelerator: Accelerator, model: Module, optimizer: Optimizer) -> tuple[Module, Any]:
    """The model as all ranks train it together, and its optimiser."""
    model, stepping = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        # Buffers are the same on all ranks already; sending them around would be a collective call in each forward.
        # accelerate knows only an older name of this setting, of which torch warns.
        model.forward_sync_buffers = False
    return model, stepping


OPTIONAL = "tensorboard"
"""Used where it is installed, since it needs no account."""


class Tracker(Protocol):
    """One of accelerate's run trackers."""

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Figures of a step."""

    def finish(self) -> None:
        """Write out what is left."""


def open_trackers(names: Sequence[str], run_name: str, folder: Path) -> list[Tracker]:
    """accelerate's trackers of these names, started. Raises SettingError for one that is unknown or not installed."""
    found: list[Tracker] = []
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise SettingError(
                f"train.trackers: {name!r} is not known; {nearest(name, [*LOGGER_TYPE_TO_CLASS, 'jsonl'])}"
            )
        if name not in available:
            text = f"train.trackers: {name!r} is not installed here: pip install {name.replace('_', '-')}"
            if name != OPTIONAL:
                raise SettingError(text)
            structlog.get_logger("offsetrl.health").info(text)
            continue
        kind = LOGGER_TYPE_TO_CLASS[name]
        given = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        tracker = kind(run_name, **given)
        try:
            tracker.start()
        except OSError as error:  # a disk that is full, say: it costs the copy, never the training
            structlog.get_logger("offsetrl.health").warning("a tracker is left out", tracker=name, error=str(error))
            continue
        found.append(tracker)
    return found
