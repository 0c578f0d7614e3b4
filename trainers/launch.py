"""Starts the other ranks of a trainer on this machine, where the settings ask for some and no launcher has done it.

A launcher (`torchrun`, `accelerate launch`) says RANK and WORLD_SIZE in the environment and starts every rank itself.
Without one, `train.ranks = 2` makes `offsetrl train` rank 0 and start the same command once more as rank 1, over
loopback. Only rank 0 is told to stop; the others end when it says so, or when it is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from infra.embedded.ports import HOST, find_free
from infra.lifecycle import PARENT_VARIABLE
from infra.train_settings import TrainTable
from schemas.errors import RankLost, SettingError

_END_S = 20.0
_LOG = structlog.get_logger("offsetrl.ranks")


class Place(NamedTuple):
    """Which rank a process is."""

    rank: int
    size: int


def place_of(table: TrainTable, environ: Mapping[str, str]) -> Place:
    """What a launcher says; without one, the first of as many as the settings ask for. Raises SettingError.

    >>> place_of(TrainTable(ranks=2), {}), place_of(TrainTable(), {"RANK": "3", "WORLD_SIZE": "4"})
    (Place(rank=0, size=2), Place(rank=3, size=4))
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Place(0, table.ranks)
    if table.ranks not in (1, size):
        raise SettingError(
            f"train.ranks is {table.ranks}, but a launcher started {size} ranks: leave train.ranks out, or start "
            "`offsetrl train` without a launcher"
        )
    return Place(int(environ["RANK"]), size)


class Others:
    """The ranks that this process has started."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def check(self) -> None:
        """Raises RankLost when one of them has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                raise RankLost(
                    f"rank {rank} (pid {process.pid}) ended with exit code {code}; its reason stands above. All ranks "
                    "end, and training goes on from the newest checkpoint when they are started again"
                )

    def close(self, grace_s: float = _END_S) -> None:
        """Wait for them to end, and kill what has not."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
                continue
            process.kill()
            process.wait()


_started: list[Others] = []
"""Of this process, while they run."""


def check_started() -> None:
    """Raises RankLost when a rank that this process has started has ended."""
    for found in _started:
        found.check()


@contextlib.contextmanager
def others(table: TrainTable) -> Iterator[Others]:
    """Start the ranks of this machine that nobody has started; they have ended when the context is left."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or table.ranks == 1:
        yield Others([])
        return
    (port,) = find_free(1)
    shared = {
        "WORLD_SIZE": str(table.ranks), "LOCAL_WORLD_SIZE": str(table.ranks), "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(table.threads or 1)),
    }  # fmt: skip
    found = Others([_start(rank, shared) for rank in range(1, table.ranks)])
    os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
    _LOG.info("ranks started", ranks=table.ranks, port=port)
    _started.append(found)
    grace_s = _END_S
    try:
        yield found
    except BaseException:
        grace_s = 2.0  # nobody tells them to end any more; their connections to this rank are what ends them
        raise
    finally:
        _started.remove(found)
        found.close(grace_s)


def _start(rank: int, shared: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The command of this process once more, as another rank."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT_VARIABLE: str(os.getpid())}
    return subprocess.Popen(sys.orig_argv, executable=sys.executable, env={**os.environ, **shared, **own})
