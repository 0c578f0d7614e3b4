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
from producers.engines import check_length, check_request, check_tensors, model_config, tensor_shapes
from producers.tokenizer import eos_ids
from schemas.errors import EngineError
from schemas.records import Finish, Sampling, Version, VersionRun
from schemas.seeds import derive_seed


def make(
    folder: Path, version: Version, table: RolloutTable, *, device: str = "auto", recompute_kv: bool = False
) -> TransformersEngine:
    """Load a folder. `device` is `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    With `recompute_kv`, running requests recompute their keys and values after a swap instead of keeping those of the
    older weights.
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
        recompute_kv=recompute_kv,
    )


@dataclass
class _Row:
    """One running request."""

    request: GenerationRequest
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    finish: Finish | None = None
    old_kv: bool = False

    def add(self, token: int, logprob: float, version: Version) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.runs and self.runs[-1][:2] == version:
            self.runs[-1] = self.runs[-1]._replace(count=self.runs[-1].count + 1)
        else:
            self.runs.append(VersionRun(*version, 1))

    def generation(self) -> Generation:
        assert self.finish is not None
        return Generation(
            id=self.request.id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.runs),
            finish=self.finish,
            old_kv=self.old_kv,
        )


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


class TransformersEngine:
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
        recompute_kv: bool,
    ) -> None:
        config = model_config(folder)
        check_length(config, max_model_len)
        self._tensors = tensor_shapes(folder)
        self._model = _load_model(folder, dtype).to(device).eval()
        accepted = inspect.signature(self._model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted
        self._vocab_size, self._stop_ids = int(config["vocab_size"]), frozenset(eos_ids(folder))
        self._max_model_len, self._max_running = max_model_len, max_running
        self._device, self._recompute_kv = device, recompute_kv
        self._version = version
        self._waiting: dict[str, GenerationRequest] = {}
        self._cohorts: list[_Cohort] = []
        self._usable = True

    @property
    def version(self) -> Version:
        """The weights that the next step samples from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + self._num_started

    @property
    def _num_started(self) -> int:
        return sum(len(cohort.rows) for cohort in self._cohorts)

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError for a prompt that cannot be continued and for an id that is running."""
        check_request(request, self._max_model_len, self._vocab_size)
        started = (row.request.id for cohort in self._cohorts for row in cohort.rows)
        if request.id in self._waiting or request.id in started:
            raise ValueError(f"request {request.id!r} is running already; give each one an id of its own")
        self._waiting[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids do not matter."""
        self._waiting.pop(request_id, None)
        for cohort in self._cohorts:
            kept = [index for index, row in enumerate(cohort.rows) if row.request.id != request_id]
            if len(kept) < len(cohort.rows):
                cohort.keep(kept)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def step(self) -> list[Generation]:
        """Advance all running requests by one token; returns those that finished. Raises EngineError."""
        self._check_usable()
        self._admit()
        finished: list[Generation] = []
        try:
            with torch.inference_mode():
                for cohort in self._cohorts:
                    finished += self._advance(cohort)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            self._usable = False
            raise EngineError(f"the model failed in a step: {error!r}; restart this worker") from error
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return finished

    def load(self, folder: Path, version: Version) -> None:
        """Swap in the weights of a folder. Raises EngineError, after which the engine must not be used."""
        self._check_usable()
        self._usable = False  # half a copy cannot be undone
        try:
            check_tensors(folder, self._tensors)
            _copy_weights(self._model, folder)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise EngineError(
                f"weights {version} in {folder} could not be loaded: {error!r}; restart this worker"
            ) from error
        self._usable = True
        self._version = version
        for cohort in self._cohorts:
            if self._recompute_kv:
                cohort.cache = cohort.mask_BL = None
            for row in cohort.rows:
                row.old_kv = not self._recompute_kv

    def close(self) -> None:
        """Let go of the model."""
        self._usable = False
        self._cohorts, self._waiting = [], {}
        del self._model

    def _check_usable(self) -> None:
        if not self._usable:
            raise EngineError("this engine failed or was closed earlier and must not be used: restart this worker")

    def _admit(self) -> None:
        rows = []
        for _ in range(min(len(self._waiting), self._max_running - self._num_started)):
            request = self._waiting.pop(next(iter(self._waiting)))
            rows.append(_Row(request, min(request.sampling.max_tokens, self._max_model_len - len(request.prompt))))
        if rows:
            self._cohorts.append(_Cohort(rows))

    def _advance(self, cohort: _Cohort) -> list[Generation]:
        """Give each row of a cohort one token; takes out and returns those that finished."""
        rows = cohort.rows
        logprobs_BV = processed_logprobs(self._forward(cohort).float(), [row.request.sampling for row in rows])
        tokens_B = draw(logprobs_BV, [(row.request.seed, len(row.tokens)) for row in rows])
        chosen = logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1).tolist()
        for row, token, logprob in zip(rows, tokens_B.tolist(), chosen, strict=True):
            row.add(token, logprob, self._version)
            if token in self._stop_ids:
                row.finish = Finish.STOP
            elif len(row.tokens) >= row.max_tokens:
                row.finish = Finish.LENGTH
        finished = [row.generation() for row in rows if row.finish]
        if finished:
            cohort.keep([index for index, row in enumerate(rows) if not row.finish])
        return finished

    def _forward(self, cohort: _Cohort) -> torch.Tensor:
        """Logits [B, V] of each row's next token."""
        if cohort.cache is None or cohort.mask_BL is None:
            ids, mask_BL = _left_padded([[*row.request.prompt, *row.tokens] for row in cohort.rows])
            cohort.mask_BL = mask_BL = mask_BL.to(self._device)
            positions = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        else:
            ids = torch.tensor([[row.tokens[-1]] for row in cohort.rows])
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


def processed_logprobs(logits_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Log-probs [B, V] of the distribution that is sampled from: temperature, then min-p, top-k and top-p.

    >>> two = torch.tensor([[0.0, 2.0]])
    >>> processed_logprobs(two, [Sampling(temperature=2.0)]).exp()
    tensor([[0.2689, 0.7311]])
    >>> processed_logprobs(two, [Sampling(top_k=1)]).exp()
    tensor([[0., 1.]])
    """
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings], device=logits_BV.device)
    logits_BV = logits_BV / temperatures
    for row, sampling in enumerate(samplings):
        if sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
            logits_BV[row] = _truncated(logits_BV[row], sampling)
    return logits_BV.log_softmax(-1)


def _truncated(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    lowest = float("-inf")
    if sampling.min_p > 0:
        probs_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs_V < sampling.min_p * probs_V.max(), lowest)
    if 0 < sampling.top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], lowest)
    if sampling.top_p < 1:
        ordered, order = logits_V.sort(descending=True)
        probs = ordered.softmax(-1)
        ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, lowest)  # the most likely one stays
        logits_V = torch.empty_like(logits_V).scatter(0, order, ordered)
    return logits_V


def draw(logprobs_BV: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A token [B] for each row, by inverting its cumulative distribution at a number made from (seed, token index).

    >>> draw(torch.tensor([[0.25, 0.75]]).log(), [(1, 0)]) == draw(torch.tensor([[0.25, 0.75]]).log(), [(1, 0)])
    tensor([True])
    """
    uniform = [[(derive_seed(seed, index) >> 10) * 2.0**-53] for seed, index in places]
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    threshold_B1 = torch.tensor(uniform, dtype=torch.float64, device=logprobs_BV.device) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1)  # never one of probability 0


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
