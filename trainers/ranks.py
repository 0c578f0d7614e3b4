"""The processes that train one policy together: rank 0 leads and says what is next, the others do the same after it.

Orders travel as bytes through a gloo group of their own, whatever the gradients travel through; nothing is pickled. A
rank that dies breaks the connections of the others, so each of them ends with `RankLost`; one that hangs is lost when
a collective call takes longer than the limit.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import OffsetRLError, RankLost
from trainers.launch import check_started

_CHUNK_BYTES = 256 * 1024 * 1024
_LOOK_S = 0.05
_MARKS = ("gloo", "nccl", "connection", "timed out", "processgroup", "socket")
"""Words of which one is in every error of a broken group; torch raises them all as RuntimeError."""


class Order(enum.IntEnum):
    """What every rank does next."""

    BUILD = 1
    """Make the model and its optimiser anew."""
    RESTORE = 2
    """Take these tensors."""
    EXECUTE = 3
    """Take the step of this plan over these outcomes."""
    TENSORS = 4
    """Gather what a checkpoint holds."""
    WEIGHTS = 5
    """Gather the weights."""
    REST = 6
    """Nothing: only to show that rank 0 is there."""
    END = 7


class Ranks:
    """This process among those that train together; alone, every call returns at once."""

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = rank, size
        self._control = control

    def tell(self, order: Order, *frames: bytes) -> None:
        """Rank 0: give an order. Raises RankLost."""
        if self.size == 1:
            return
        assert self.rank == 0
        body = pack(frames)
        with self.guard(f"order {order.name}"):
            self._broadcast(torch.tensor([order, len(body)], dtype=torch.int64))
            whole = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
            self._broadcast_in_chunks(whole)

    def hear(self) -> tuple[Order, list[bytes]]:
        """Other ranks: wait for the next order. Raises RankLost."""
        with self.guard("the next order"):
            head = torch.zeros(2, dtype=torch.int64)
            self._broadcast(head)
            order, size = head.tolist()
            body = torch.empty(size, dtype=torch.uint8)
            self._broadcast_in_chunks(body)
        return Order(order), unpack(body.numpy().tobytes())

    def go_on(self, wanted: bool = True) -> bool:
        """Whether the step goes on: what rank 0 wants. All ranks ask equally often, so all leave at one place.

        Raises RankLost.
        """
        if self.size == 1:
            return wanted
        with self.guard("the next micro-batch"):
            said = torch.tensor([wanted], dtype=torch.int64)
            self._broadcast(said)
        return bool(said)

    def _broadcast_in_chunks(self, body: torch.Tensor) -> None:
        for start in range(0, len(body), _CHUNK_BYTES):
            self._broadcast(body[start : start + _CHUNK_BYTES])

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._control)

    def leave(self) -> None:
        """Close the connections to the other ranks."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turns what torch raises for a broken group into RankLost."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if self.size == 1 or not any(mark in text.lower() for mark in _MARKS):
                raise
            raise RankLost(
                f"rank {self.rank} of {self.size} lost another rank at {what}: {text.splitlines()[0][:300]}; all "
                "ranks end, and training goes on from the newest checkpoint when they are started again"
            ) from error


def join(limit_s: float) -> Ranks:
    """Meet the other ranks that a launcher has started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), once per process.

    Raises RankLost when they do not come.
    limit_s: longest that any collective call waits, in seconds.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if not _joined:
        _joined.append(_join(size, limit_s))
    return _joined[0]


_joined: list[Ranks] = []
"""This process's place, once it has met the others: torch keeps its groups per process as well."""


_kept: list[object] = []
"""Groups, for as long as the process lives: freed with a model that DDP wraps, gloo's destructor waits for a thread which
may itself wait for Python's lock, held by who frees the model. Both then wait for ever (torch 2.13)."""


def _join(size: int, limit_s: float) -> Ranks:
    rank = int(os.environ["RANK"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate warns otherwise; threads are set from the settings
    limit = timedelta(seconds=limit_s)
    ranks = Ranks(rank, size)
    with ranks.guard("the meeting of all ranks"):
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if (
                os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            ):  # torchrun holds the store, and watches all ranks
                dist.init_process_group(backend, timeout=limit)
            else:
                store = _met(rank, size, limit_s)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        control = dist.new_group(backend="gloo", timeout=limit)
    _kept.extend((dist.group.WORLD, control))
    return Ranks(rank, size, control)


def _met(rank: int, size: int, limit_s: float) -> Any:
    """The store at which all ranks have met. Rank 0 waits in small steps, to see it when one that it started has ended.

    Raises RankLost.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=limit_s)
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so
    store = kind(host, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    if rank:
        store.set(f"met/{rank}", "")
        return store
    until = time.monotonic() + limit_s
    while missing := [other for other in range(1, size) if not store.check([f"met/{other}"])]:
        check_started()
        if time.monotonic() > until:
            raise RankLost(
                f"rank 0 of {size} waited {limit_s:g} s at {host}:{port} and did not meet ranks {missing}: see why they did "
                "not start, or set train.rank_timeout_s higher if they take so long to load"
            )
        time.sleep(_LOOK_S)
    return store


@contextlib.contextmanager
def dismissing() -> Iterator[None]:
    """Rank 0: the others are told to end when this context is left, unless they could not hear it any more.

    After an error that is none of ours, or of a lost rank, they may be anywhere: what ends them is that their
    connections to this process break.
    """
    try:
        yield
    except RankLost:
        raise
    except OffsetRLError:
        _dismiss()
        raise
    _dismiss()


def _dismiss() -> None:
    for ranks in _joined:
        with contextlib.suppress(RankLost):  # they are gone, which is as well
            ranks.tell(Order.END)
        ranks.leave()


def pack(frames: Sequence[bytes]) -> bytes:
    """Frames one after the other, each behind its length.

    >>> unpack(pack([b"plan", b"", b"outcome"]))
    [b'plan', b'', b'outcome']
    """
    return b"".join(struct.pack("<Q", len(frame)) + frame for frame in frames)


def unpack(body: bytes) -> list[bytes]:
    """What `pack` was given."""
    frames: list[bytes] = []
    at = 0
    while at < len(body):
        (size,) = struct.unpack_from("<Q", body, at)
        frames.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    return frames
