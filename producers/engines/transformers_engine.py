"""The light engine: a Hugging Face causal model and a short decode loop; no vLLM, no compiler, starts in seconds.

Knows: requests that start together form a cohort, which shares a left-padded cache of keys and values; every step moves
each cohort on by one token. Which token is drawn depends only on the logits, the request's seed and the token's place,
never on who else is in the batch. Loads safetensors only and runs no code from the folder.

Shapes: B rows of a cohort, L positions in its cache (padding included), V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from infra.settings import RolloutTable
from producers.engine import Generation, GenerationRequest
from producers.engine_parts.answer import Answer
from producers.engine_parts.sampling import draw, processed_logprobs
from producers.engine_parts.stepped import SteppedEngine
from producers.engine_parts.swap import Swap, swap_mode
from producers.engines import check_length, check_tensors, model_config, tensor_shapes
from producers.tokenizer import eos_ids
from schemas.errors import EngineError
from schemas.records import Finish, Version


def make(
    folder: Path, version: Version, table: RolloutTable, *, device: str = "auto", swap: str = "keep"
) -> TransformersEngine:
    """Load a folder. `device` is `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    `swap` says what running requests do when weights are swapped: `keep` keys and values of the older weights,
    `recompute` them, or `finish` first.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if table.threads:
        torch.set_num_threads(table.threads)
    return TransformersEngine(
        folder,
        version,
        max_model_len=table.max_model_len,
        max_running=table.concurrency,
        dtype=table.dtype,
        device=device,
        swap=swap_mode(swap),
    )


@dataclass(eq=False)
class _Row:
    """One request."""

    request: GenerationRequest
    max_tokens: int
    answer: Answer = field(default_factory=Answer)


@dataclass
class _Cohort:
    """Requests that share a cache; no cache: all that they hold so far is to be read by the next forward pass."""

    rows: list[_Row]
    cache: Any = None
    mask_BL: torch.Tensor | None = None

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.rows = [self.rows[index] for index in kept]
        if self.cache is not None and self.mask_BL is not None and kept:
            indices = torch.tensor(kept, device=self.mask_BL.device)
            self.cache.batch_select_indices(indices)
            self.mask_BL = self.mask_BL[indices]


class TransformersEngine(SteppedEngine):
    """A causal language model, decoded in cohorts."""

    def __init__(
        self,
        folder: Path,
        version: Version,
        *,
        max_model_len: int,
        max_running: int,
        dtype: str,
        device: str,
        swap: Swap,
    ) -> None:
        config = model_config(folder)
        check_length(config, max_model_len)
        vocab_size = int(config["vocab_size"])
        super().__init__(
            version, max_model_len=max_model_len, max_running=max_running, vocab_size=vocab_size, swap=swap
        )
        self._tensors = tensor_shapes(folder)
        self._model = _load_model(folder, dtype).to(device).eval()
        accepted = inspect.signature(self._model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted
        self._stop_ids = frozenset(eos_ids(folder))
        self._device = device
        self._rows: dict[str, _Row] = {}
        self._cohorts: list[_Cohort] = []

    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        rows = {request.id: _Row(request, self._limit(request)) for request in requests}
        self._rows.update(rows)
        self._cohorts.append(_Cohort(list(rows.values())))

    def _advance(self) -> list[Generation]:
        finished: list[Generation] = []
        with torch.inference_mode():
            for cohort in self._cohorts:
                finished += self._advance_cohort(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return finished

    def _forget(self, request_id: str) -> None:
        gone = self._rows.pop(request_id)
        cohort = next(cohort for cohort in self._cohorts if gone in cohort.rows)
        cohort.keep([index for index, row in enumerate(cohort.rows) if row is not gone])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def _so_far(self, request_id: str) -> Generation:
        return self._rows[request_id].answer.generation(request_id, Finish.ABORT, request_id in self._old_kv)

    def _load(self, folder: Path, version: Version) -> None:
        check_tensors(folder, self._tensors)
        _copy_weights(self._model, folder)
        if self._swaps.mode is Swap.RECOMPUTE:
            for cohort in self._cohorts:
                cohort.cache = cohort.mask_BL = None

    def _let_go(self) -> None:
        self._rows, self._cohorts = {}, []
        del self._model

    def _advance_cohort(self, cohort: _Cohort) -> list[Generation]:
        """Give each row of a cohort one token; takes out and returns those that finished."""
        rows = cohort.rows
        logprobs_BV = processed_logprobs(self._forward(cohort).float(), [row.request.sampling for row in rows])
        tokens_B = draw(logprobs_BV, [(row.request.seed, len(row.answer.tokens)) for row in rows])
        chosen = logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1).tolist()
        finished: list[Generation] = []
        for row, token, logprob in zip(rows, tokens_B.tolist(), chosen, strict=True):
            row.answer.add(token, logprob, self._version)
            if token in self._stop_ids or len(row.answer.tokens) >= row.max_tokens:
                finish = Finish.STOP if token in self._stop_ids else Finish.LENGTH
                finished.append(row.answer.generation(row.request.id, finish, row.request.id in self._old_kv))
                del self._rows[row.request.id]
        if finished:
            cohort.keep([index for index, row in enumerate(rows) if row.request.id in self._rows])
        return finished

    def _forward(self, cohort: _Cohort) -> torch.Tensor:
        """Logits [B, V] of each row's next token."""
        if cohort.cache is None or cohort.mask_BL is None:
            ids, mask_BL = _left_padded([[*row.request.prompt, *row.answer.tokens] for row in cohort.rows])
            cohort.mask_BL = mask_BL = mask_BL.to(self._device)
            positions = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        else:
            ids = torch.tensor([[row.answer.tokens[-1]] for row in cohort.rows])
            cohort.mask_BL = mask_BL = torch.nn.functional.pad(cohort.mask_BL, (0, 1), value=1)
            positions = mask_BL.sum(-1, keepdim=True) - 1
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask_BL,
            past_key_values=cohort.cache,
            use_cache=True,
            **({"position_ids": positions} if self._takes_positions else {}),
            **self._last_only,
        )
        cohort.cache = output.past_key_values
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _left_padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, L] ending together, and their mask; padding holds id 0, which is never attended to."""
    length = max(map(len, sequences))
    ids = torch.tensor([[0] * (length - len(sequence)) + list(sequence) for sequence in sequences])
    mask = torch.tensor([[0] * (length - len(sequence)) + [1] * len(sequence) for sequence in sequences])
    return ids, mask


def _load_model(folder: Path, dtype: str) -> Any:
    with _no_progress_bar():
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise EngineError(f"the model in {folder} does not load: {error}") from error
    broken = {name: info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(name)}
    if broken:  # transformers would fill in random numbers
        raise EngineError(f"the weights in {folder} do not fit its config.json: {broken}")
    return model


def _copy_weights(model: Any, folder: Path) -> None:
    """Copy every tensor of the files into the model's own storage; tied ones follow by themselves."""
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    own[name].copy_(file.get_tensor(name))


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
