"""The policy's weights in memory: load them, ask them for log-probs, write them as an engine loads them.

Shapes: B = rows, T = positions, V = vocabulary, K = positions of a micro-batch that outputs are needed for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from infra.weights.adapter import ADAPTER_CONFIG_NAME
from schemas.errors import SettingError, WeightsError
from trainers.batching import MicroBatch
from trainers.entropy import entropies
from trainers.shards import local_pointer, placed_like

Policy: TypeAlias = torch.nn.Module
"""A causal language model of transformers: called with `input_ids`, it gives `.logits`."""

MAX_SHARD_BYTES = 1024 * 1024 * 1024
_LORA = ".lora_"
"""In the names of an adapter's tensors."""


def make_deterministic(threads: int) -> None:
    """Fix the number of CPU threads (0: leave it) and let only repeatable algorithms run: equal steps give equal bits.

    Call it before anything else uses torch in this process. Raises RuntimeError later where an operation has no
    repeatable implementation.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that costs time at each allocation
    if threads:
        torch.set_num_threads(threads)


def load_policy(folder: Path, *, dtype: str = "float32") -> Policy:
    """The model of a folder in Hugging Face layout, with gradients on and dropout off. Raises SettingError.

    Dropout stays off in training: log-probs must be those of the model that is published. Code that a folder brings
    with it is never run.
    """
    if not (folder / "config.json").is_file():
        raise SettingError(
            f"{folder} is not a model folder: it has no config.json; give a folder in the Hugging Face layout "
            "(`offsetrl model new` makes a small one)"
        )
    if (folder / ADAPTER_CONFIG_NAME).exists():
        raise SettingError(f"{folder} holds {ADAPTER_CONFIG_NAME}: give a folder with the adapter merged in")
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    loaded: Policy = model.eval()
    loaded.requires_grad_(True)
    return loaded


def checkpoint_gradients(model: Policy) -> None:
    """Let layers forget their activations and compute them again in the backward pass; changes no number.

    transformers does so only while a model is in training mode, so every dropout is set to 0 first.
    """
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    enable: Any = model
    enable.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


class Outputs(NamedTuple):
    """What a model says about each row's tokens, float32, [B, T]; 0 before position `batch.first`."""

    logprobs_BT: Tensor
    """At each row's own temperature."""
    entropies_BT: Tensor | None = None
    values_BT: Tensor | None = None


def token_logprobs(model: Policy, batch: MicroBatch) -> Tensor:
    """Log-probs [B, T] of each row's tokens, see `token_outputs`."""
    return token_outputs(model, batch).logprobs_BT


def token_outputs(model: Policy, batch: MicroBatch, *, entropy: bool = False) -> Outputs:
    """Log-probs of each row's tokens at its own temperature; with them entropies, and values of a model with a head.

    Outputs are computed from `batch.first` on only: prompts are most of the tokens and the vocabulary is the largest
    dimension. No attention mask is given, since rows are padded on the right (see `trainers.batching`).
    """
    device = next(model.parameters()).device
    tokens_BT = torch.from_numpy(batch.tokens_BT).to(device)
    size, width = tokens_BT.shape
    num_needed = width - batch.first
    if num_needed == 0:
        return Outputs(torch.zeros(size, width, device=device))
    found = model(input_ids=tokens_BT[:, :-1], use_cache=False, logits_to_keep=num_needed)
    logits_BKV = found.logits.float()
    if (batch.temperature_B != 1.0).any():
        logits_BKV = logits_BKV / torch.from_numpy(batch.temperature_B).to(device)[:, None, None]
    chosen_BK = logits_BKV.gather(-1, tokens_BT[:, batch.first :, None]).squeeze(-1) - logits_BKV.logsumexp(-1)
    values_BK = getattr(found, "state_values", None)
    return Outputs(
        _from_first(chosen_BK, batch),
        _from_first(entropies(logits_BKV), batch) if entropy else None,
        None if values_BK is None else _from_first(values_BK, batch),
    )


def _from_first(numbers_BK: Tensor, batch: MicroBatch) -> Tensor:
    """K numbers per row at their positions: B x T."""
    numbers_BT: Tensor = torch.nn.functional.pad(numbers_BK, (batch.first, 0))
    return numbers_BT


def model_tensors(model: Policy) -> dict[str, Tensor]:
    """Every parameter and every saved buffer once, by name; a tied tensor stands under its first name.

    Of a model with an adapter: the adapter's alone, since nothing else ever changes.
    """
    tensors = model.state_dict()
    return _once({name: tensors[name] for name in tensors if _LORA in name} or tensors)


def frozen_tensors(model: Policy) -> dict[str, Tensor]:
    """What `model_tensors` gave before an adapter was added."""
    tensors = model.state_dict()
    return _once({name.replace(".base_layer.", "."): tensors[name] for name in tensors if _LORA not in name})


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in tensors.items():
        key = (local_pointer(tensor), tuple(tensor.shape))
        if key not in seen or tensor.numel() == 0:
            seen.add(key)
            found[name] = tensor.detach()
    return found


def restore_model(model: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of `model_tensors` back, in place. Raises WeightsError when names, shapes or dtypes differ."""
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        differing = sorted(own.keys() ^ tensors.keys())
        raise WeightsError(
            f"a checkpoint of another model: {len(differing)} tensors are in only one of the two, the first is "
            f"{differing[0]!r}; use the model folder that the run began with"
        )
    for name, tensor in own.items():
        given = tensors[name]
        if given.dtype == torch.bfloat16 and tensor.dtype == torch.float32:
            raise WeightsError(
                f"tensor {name!r} is torch.bfloat16 in the checkpoint, and weights are trained in torch.float32: it is of "
                "an older trainer, whose updates were lost in rounding. Begin a new run with the newest version that the "
                "run published as its model"
            )
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise WeightsError(
                f"tensor {name!r} is {given.dtype} {list(given.shape)} in the checkpoint and {tensor.dtype} "
                f"{list(tensor.shape)} in the model; use the model folder, dtype and lora_rank that the run began with"
            )
        tensor.copy_(placed_like(given, tensor))


def weights_bytes(
    model: Policy, *, tensors: Mapping[str, Tensor] | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, bytes]:
    """The weights as files by name, as `save_pretrained` writes them: safetensors, tied heads left out, sharded when
    larger than `max_shard_bytes` (then with an index). Configuration and tokenizer files are not among them.

    tensors: in place of the model's own, which may lie in shards.
    """
    saved: Any = model
    with tempfile.TemporaryDirectory(prefix="offsetrl-weights-") as folder, quiet():
        saved.save_pretrained(folder, state_dict=tensors and dict(tensors), max_shard_size=max_shard_bytes)
        return {
            path.name: path.read_bytes()
            for path in sorted(Path(folder).iterdir())
            if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        }


def weights_digest(model: Policy) -> str:
    """The digest of a model's weights, see `tensors_digest`."""
    return tensors_digest(model_tensors(model))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in the order of their names; independent of files."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data if tensor.dim() else _scalar(tensor))
    return found.hexdigest()


def _scalar(tensor: Tensor) -> bytes:
    return tensor.cpu().reshape(1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers: a daemon's output is its log."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
