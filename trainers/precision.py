"""bfloat16 as a type to compute in: master weights and optimiser are float32, what is published is rounded once.

AdamW moves a weight by about the learning rate. Between bfloat16's neighbours of 0.02 lie 1.2e-4, of 1.0 lie 7.8e-3, so
at the rates of reinforcement learning (1e-6) weights kept in it would stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainers.model import Policy


def compute_in_bfloat16(model: Policy) -> Policy:
    """The model with its forward pass under autocast, and so its backward pass: products in bfloat16, sums between layers,
    norms and gradients in float32. It gives logits in bfloat16, as engines do; whoever asks casts them.
    """
    forward = model.forward

    @functools.wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = computed
    return model


def rounded(model: Policy, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model as bfloat16, to nearest, ties to even; what its kind never has in bfloat16 stays as it is.

    >>> policy = torch.nn.Linear(1, 1)
    >>> rounded(policy, {"weight": torch.tensor([1.0, 1.003, 1.005]), "steps": torch.tensor([7])})
    {'weight': tensor([1.0000, 1.0000, 1.0078], dtype=torch.bfloat16), 'steps': tensor([7])}
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()  # transformers' list, such as a router's bias
    return {
        name: tensor
        if tensor.dtype != torch.float32 or any(f".{part}." in f".{name}." for part in kept)
        else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
