"""An optimiser's state as named tensors, without pickle, and back again bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from schemas.errors import WeightsError
from trainers.shards import placed_like, whole


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named `<number of the parameter>.<key>`; live, not copies, but for shards."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": whole(value) for number, entries in state.items() for key, value in entries.items()}


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take back what `optimizer_tensors` gave, bit for bit; rates and other settings stay as they are now.

    Raises WeightsError when it does not fit the optimiser's parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise WeightsError(f"optimiser tensor {name!r} belongs to none of the {len(parameters)} parameters")
        parameter = parameters[int(number)]
        if tensor.dim() and tensor.shape != parameter.shape:
            raise WeightsError(f"optimiser tensor {name!r} is {list(tensor.shape)}, unlike its parameter")
        state.setdefault(int(number), {})[key] = placed_like(tensor, parameter) if tensor.dim() else tensor.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
