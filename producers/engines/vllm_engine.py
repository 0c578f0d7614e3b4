"""vLLM behind the engine seam: one process, one thread, stepped by its owner; weights are swapped between two steps.

The only file that speaks vLLM. Knows: how to keep it in one process and quiet, what it forgets when it reloads weights
(the output layer of tied models on CPU, the prefix cache), and that a reload that failed leaves it broken for good.
Loads safetensors only and runs no code from the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from infra.settings import RolloutTable
from producers.engine import Generation, GenerationRequest
from producers.engines import check_length, check_request, check_tensors, model_config, tensor_shapes
from producers.tokenizer import eos_ids
from schemas.errors import EngineError
from schemas.records import Finish, Version, VersionRun
from schemas.seeds import derive_seed

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_KV_LIMIT_BYTES = 1 << 30


def make(
    folder: Path,
    version: Version,
    table: RolloutTable,
    *,
    kv_cache_mib: int = 0,
    gpu_memory_share: float = 0.9,
    max_batched_tokens: int = 8192,
    recompute_kv: bool = False,
) -> VllmEngine:
    """Start vLLM on a folder.

    `kv_cache_mib` bounds keys and values on CPU (0: as much as `concurrency` episodes need, at most 1 GiB);
    `gpu_memory_share` bounds the whole on a GPU. `max_batched_tokens` go into one step. With `recompute_kv`, running
    requests recompute their keys and values after a swap instead of keeping those of the older weights.
    """
    with _quiet():
        return VllmEngine(
            folder,
            version,
            max_model_len=table.max_model_len,
            max_running=table.concurrency,
            dtype=table.dtype,
            threads=table.threads,
            kv_cache_bytes=kv_cache_mib << 20,
            gpu_memory_share=gpu_memory_share,
            max_batched_tokens=max(max_batched_tokens, table.max_model_len),
            recompute_kv=recompute_kv,
        )


class VllmEngine:
    """vLLM's synchronous engine, in this process."""

    def __init__(
        self,
        folder: Path,
        version: Version,
        *,
        max_model_len: int,
        max_running: int,
        dtype: str,
        threads: int,
        kv_cache_bytes: int,
        gpu_memory_share: float,
        max_batched_tokens: int,
        recompute_kv: bool,
    ) -> None:
        config = model_config(folder)
        check_length(config, max_model_len)
        self._max_model_len, self._max_running = max_model_len, max_running
        self._vocab_size = int(config["vocab_size"])
        self._stop_ids = list(eos_ids(folder))
        self._recompute_kv = recompute_kv
        self._tensors = tensor_shapes(folder)
        self._waiting: dict[str, GenerationRequest] = {}
        self._running: set[str] = set()
        self._old_kv: set[str] = set()
        self._usable = True
        arguments = {
            "model": str(folder),
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # sampling defaults of the folder would bend the distribution unseen
            "load_format": "safetensors",  # never pickles
            "use_tqdm_on_load": False,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_running,
            "max_num_batched_tokens": max_batched_tokens,
            "gpu_memory_utilization": gpu_memory_share,
            "logprobs_mode": "processed_logprobs",  # of the distribution really sampled from
            "disable_log_stats": True,
            "async_scheduling": False,  # a step's tokens must be known when weights are swapped after it
            "distributed_executor_backend": "uni",
        }
        self._on_cpu, self._engine = _start(arguments, threads, kv_cache_bytes)
        self._set_version(version)

    @property
    def version(self) -> Version:
        """The weights that the next step samples from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError for a prompt that cannot be continued and for an id that is running."""
        check_request(request, self._max_model_len, self._vocab_size)
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request {request.id!r} is running already; give each one an id of its own")
        self._waiting[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids do not matter."""
        self._waiting.pop(request_id, None)
        if request_id in self._running:
            self._running.discard(request_id)
            self._old_kv.discard(request_id)
            self._engine.abort_request([request_id])

    def step(self) -> list[Generation]:
        """Advance all running requests by one token; returns those that finished. Raises EngineError."""
        self._check_usable()
        try:
            self._admit()
            outputs = self._engine.step() if self._running else []
        except Exception as error:
            self._usable = False
            raise EngineError(f"vLLM failed in a step: {error!r}; restart this worker") from error
        return [self._finish(output) for output in outputs if output.finished]

    def load(self, folder: Path, version: Version) -> None:
        """Swap in the weights of a folder. Raises EngineError, after which the engine must not be used."""
        self._check_usable()
        self._usable = False  # vLLM cannot undo half a reload
        try:
            check_tensors(folder, self._tensors)  # vLLM only logs a missing tensor, and keeps the old one
            self._reload(folder)
        except Exception as error:
            raise EngineError(
                f"weights {version} in {folder} could not be loaded: {error!r}; vLLM does not recover from "
                "this: restart this worker"
            ) from error
        self._usable = True
        self._set_version(version)
        if not self._recompute_kv:
            self._old_kv |= self._running

    def close(self) -> None:
        """Let go of memory and of vLLM's process group."""
        self._usable = False
        self._engine.engine_core.shutdown()
        del self._engine

    def _check_usable(self) -> None:
        if not self._usable:
            raise EngineError("this engine failed or was closed earlier and must not be used: restart this worker")

    def _set_version(self, version: Version) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _admit(self) -> None:
        """Hand over waiting requests only when they can run, so that their salt is that of the weights they start on."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting.pop(next(iter(self._waiting)))
            sampling = request.sampling
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=min(sampling.max_tokens, self._max_model_len - len(request.prompt)),
                seed=derive_seed(request.seed) & 0x7FFFFFFF,  # torch's CPU generator reads 32 bits of a seed
                stop_token_ids=self._stop_ids,  # given by hand: without a tokenizer vLLM knows no end token
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {
                "type": "token",
                "prompt_token_ids": list(request.prompt),
                "cache_salt": self._salt(),
            }
            self._engine.add_request(request.id, prompt, params)
            self._running.add(request.id)

    def _salt(self) -> str:
        """Without a salt of its own, a version is answered from a prefix cache that older weights filled."""
        return str(self._version)

    def _finish(self, output: Any) -> Generation:
        completion = output.outputs[0]
        self._running.discard(output.request_id)
        runs = []
        for span in completion.weight_versions or ():
            epoch, version = map(int, span.version.split("-"))
            runs.append(VersionRun(epoch, version, span.end - span.start))
        old_kv = output.request_id in self._old_kv
        self._old_kv.discard(output.request_id)
        return Generation(
            id=output.request_id,
            tokens=tuple(completion.token_ids),
            logprobs=tuple(completion.logprobs.logprobs),
            versions=tuple(runs),
            finish=_FINISHES.get(completion.finish_reason, Finish.ABORT),
            old_kv=old_kv,
        )

    def _reload(self, folder: Path) -> None:
        with _quiet():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            if self._on_cpu:
                self._engine.apply_model(_tie_again)
        if self._recompute_kv and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the caches could not be cleared")


def warm_up() -> None:
    """Import vLLM and what it imports when it starts."""
    with _quiet():
        if _import_vllm():
            importlib.import_module("vllm.v1.worker.cpu_worker")


def _import_vllm() -> bool:
    """Import vLLM, set up for one quiet process; whether it runs on the CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its warnings then go where ours go
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        # One line of the sampler is compiled by default, with a C++ compiler, for many seconds, on the first token.
        # vLLM compiles nothing else here, and the line is as fast without.
        torch._dynamo.config.disable = True
    importlib.import_module("vllm.v1.engine.llm_engine")
    return on_cpu


def _start(arguments: dict[str, Any], threads: int, kv_cache_bytes: int) -> tuple[bool, Any]:
    """Whether vLLM runs on the CPU, and its engine."""
    on_cpu = _import_vllm()
    preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    if on_cpu:
        arguments["enforce_eager"] = True
        if threads:
            torch.set_num_threads(threads)
    try:
        return on_cpu, _engine(arguments, on_cpu, kv_cache_bytes)
    except (ValueError, OSError, RuntimeError, ImportError, AssertionError) as error:
        raise EngineError(f"vLLM does not start on {arguments['model']}: {error}") from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM puts a warning in its place
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)  # vLLM sets it for child processes; ours are none of its business
        else:
            os.environ["LD_PRELOAD"] = preload


def _engine(arguments: dict[str, Any], on_cpu: bool, kv_cache_bytes: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.engine.llm_engine import LLMEngine

    if on_cpu:
        # Import the model's class here: to look at it, vLLM would start a second Python and import everything there.
        for architecture in model_config(Path(arguments["model"])).get("architectures", ()):
            if architecture in ModelRegistry.models:
                ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    settings = EngineArgs(**arguments).create_engine_config()
    if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        settings.cache_config.kv_cache_memory_bytes = kv_cache_bytes or _kv_bytes(settings)
    engine = LLMEngine.from_vllm_config(settings, disable_log_stats=True)
    engine.renderer.get_eos_token_id()  # says once that there is no tokenizer; let it say so now
    return engine


def _kv_bytes(settings: Any) -> int:
    """Keys and values of all requests at full length, and a quarter more; clearing memory costs start-up time."""
    model, parallel, block = settings.model_config, settings.parallel_config, settings.cache_config.block_size
    values_per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    one = -(-model.max_model_len // block) * block * values_per_token * model.dtype.itemsize
    wanted = one * (settings.scheduler_config.max_num_seqs + 1) * 5 // 4
    return int(max(min(wanted, _KV_LIMIT_BYTES), 2 * one))


def _tie_again(model: torch.nn.Module) -> None:
    """Point a tied output layer at the reloaded embedding and pack it anew.

    On CPU vLLM packs the output layer's weights when it loads; a reload brings no tensor for a tied output layer, so
    it would go on with the packed copy of the old embedding: log-probs off by whole nats, and only a log line.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    config: Any = model.config
    if not getattr(config, "tie_word_embeddings", False):
        return
    found = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [module for module in found if isinstance(module, ParallelLMHead)]
    embeddings = [module for module in found if not isinstance(module, ParallelLMHead)]
    for head in heads:
        if len(embeddings) != 1:
            raise EngineError(f"a tied output layer and {len(embeddings)} embeddings: this model cannot be reloaded")
        tied = head.tie_weights(embeddings[0])
        tied.quant_method.process_weights_after_loading(tied)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what vLLM says at each start and reload of a healthy engine; what goes wrong raises."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level or logging.WARNING)
