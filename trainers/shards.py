"""Tensors that lie in shards on several ranks (FSDP2's DTensor), made whole, and laid out in shards again.

Both are collective for shards: every rank must call them, for the same tensors in the same order.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; itself where it is not in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a whole tensor, laid out as `other` is."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor.clone()


def local_pointer(tensor: Tensor) -> int:
    """Where this rank's part of a tensor lies in memory; two tensors that are tied lie at one place."""
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()
