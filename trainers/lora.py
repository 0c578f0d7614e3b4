"""LoRA through peft (arXiv:2106.09685): the model's own weights are frozen, and two small matrices beside each are trained.

    y = W x + (alpha / r) B A x      W [O, I] frozen, A [R, I] random, B [O, R] zero at first

There is no dropout: log-probs are those of the weights that are published. The adapter is trained in float32, whatever
the type of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from infra.train_settings import TrainTable
from infra.weights.adapter import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    adapter_config,
    adapter_tensor,
    merged,
    read_adapter,
)
from infra.weights.publish import Known, Source, known
from schemas.errors import SettingError
from trainers.model import Policy, frozen_tensors, model_tensors, tensors_digest, weights_bytes

_INIT_SEED = 0
"""Of the matrices A: the same on every rank and after every start."""


def add_adapter(model: Policy, table: TrainTable) -> Policy:
    """The model with an adapter at `lora_targets`, and nothing else to be trained. Raises SettingError."""
    names = _targets(model, table.lora_targets)
    config = LoraConfig(r=table.lora_rank, lora_alpha=table.lora_alpha, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_INIT_SEED)
        adapted: Policy = inject_adapter_in_model(config, model)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.eval()


def _targets(model: Policy, wanted: list[str]) -> list[str]:
    """Full names of the linear layers to change."""
    named: Any = model
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linear -= {name for name, module in model.named_modules() if module is named.get_output_embeddings()}
    last = {name.rpartition(".")[2] for name in linear}
    if not linear or (strange := sorted(set(wanted) - last)):
        raise SettingError(
            f"train.lora_targets: {strange if linear else wanted} name no linear layer of this model but its output; "
            f"allowed: {sorted(last)}, or none for all of them"
        )
    return sorted(name for name in linear if not wanted or name.rpartition(".")[2] in wanted)


class WithoutAdapter(torch.nn.Module):
    """The base of a model with an adapter, as a reference that costs no memory. Not to be asked for gradients."""

    def __init__(self, model: Policy) -> None:
        super().__init__()
        self.policy = model

    def forward(self, **inputs: Any) -> Any:
        """What the model says with its adapter off."""
        layers = [module for module in self.policy.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.policy(**inputs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class LoraFiles:
    """The files of a version of a model with an adapter: merged, or base and adapter apart."""

    def __init__(self, model: Policy, table: TrainTable) -> None:
        """Raises SettingError when the adapter would not fit the base as it is published."""
        self._model, self._table = model, table
        base = frozen_tensors(model)
        self.base_digest = tensors_digest(base)
        """SHA-256 over the frozen weights."""
        self._targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in model_tensors(model)})
        self._known: dict[str, Known] = {}
        for name, data in self._base().items():
            self._known[name] = known(name, data, functools.partial(self._base_file, name))
        there = {tensor.name for entry in self._known.values() for tensor in entry.tensors}
        if missing := sorted(name for name in map(_weight_of, model_tensors(model)) if name not in there):
            raise SettingError(
                f"train.lora_targets: {missing[0]!r} has another name, or none of its own, in the published files, so "
                "an adapter for it cannot be published: leave it out of lora_targets"
            )

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
        """Every file with weights of a version whose adapter these tensors are (see `model_tensors`)."""
        renamed = {
            adapter_tensor(_weight_of(name), "A" if ".lora_A." in name else "B"): tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
        }
        data = safetensors.torch.save(renamed)
        config = adapter_config(self._table.lora_rank, self._table.lora_alpha, self._targets)
        if self._table.lora_publish == "adapter":
            return {**self._known, ADAPTER_NAME: data, ADAPTER_CONFIG_NAME: config}
        adapter, base = read_adapter(config, data), self._base()
        shards = [(name, file) for name, file in base.items() if name.endswith(".safetensors")]
        return {**base, **dict(merged(adapter, shards))}

    def _base_file(self, name: str) -> bytes:
        return self._base()[name]

    def _base(self) -> dict[str, bytes]:
        return weights_bytes(self._model, tensors=frozen_tensors(self._model))


def _weight_of(name: str) -> str:
    """The weight that a matrix belongs to.

    >>> _weight_of("model.layers.0.q_proj.lora_A.default.weight")
    'model.layers.0.q_proj.weight'
    """
    return f"{name.split('.lora_')[0]}.weight"
