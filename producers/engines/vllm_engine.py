"""vLLM behind the engine seam: one process, one thread, stepped by its owner; weights are swapped between two steps.

The only file that speaks vLLM. Knows: how to keep it in one process and quiet, what it forgets when it reloads weights
(the output layer of tied models on CPU, the prefix cache), and that a reload that failed leaves it broken for good.
Loads safetensors only and runs no code from the folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infra.settings import RolloutTable
from producers.engine import Generation, GenerationRequest
from producers.engine_parts.stepped import SteppedEngine
from producers.engine_parts.swap import Swap, swap_mode
from producers.engine_parts.vllm_host import kv_bytes, quiet
from producers.engines import check_length, check_tensors, model_config, tensor_shapes
from producers.tokenizer import eos_ids
from schemas.errors import EngineError
from schemas.records import Finish, Version, VersionRun
from schemas.seeds import derive_seed

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_RELOAD_S = 600.0


def make(
    folder: Path,
    version: Version,
    table: RolloutTable,
    *,
    kv_cache_mib: int = 0,
    gpu_memory_share: float = 0.9,
    max_batched_tokens: int = 8192,
    tensor_parallel: int = 1,
    swap: str = "keep",
) -> VllmEngine:
    """Start vLLM on a folder.

    `kv_cache_mib` bounds keys and values on CPU (0: as much as `concurrency` episodes need, at most 1 GiB);
    `gpu_memory_share` bounds the whole on a GPU. `max_batched_tokens` go into one step. With `tensor_parallel`
    above 1 the model is spread over so many devices, each in a process of its own. `swap` says what running
    requests do when weights are swapped: `keep` keys and values of the older weights, `recompute` them, or `finish`
    first.
    """
    with quiet():
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
            tensor_parallel=tensor_parallel,
            swap=swap_mode(swap),
        )


class VllmEngine(SteppedEngine):
    """vLLM's synchronous engine; its scheduler runs in this process."""

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
        tensor_parallel: int,
        swap: Swap,
    ) -> None:
        config = model_config(folder)
        check_length(config, max_model_len)
        vocab_size = int(config["vocab_size"])
        super().__init__(
            version, max_model_len=max_model_len, max_running=max_running, vocab_size=vocab_size, swap=swap
        )
        self._stop_ids = list(eos_ids(folder))
        self._tensors = tensor_shapes(folder)
        self._names: dict[str, str] = {}  # id -> vLLM's own name for a running request
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
            "tensor_parallel_size": tensor_parallel,
            "distributed_executor_backend": "uni" if tensor_parallel == 1 else "mp",
        }
        self._on_cpu, self._engine = _start(arguments, threads, kv_cache_bytes)
        self._engine.set_weight_version(str(version))

    def _begin(self, requests: Sequence[GenerationRequest]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            sampling = request.sampling
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=self._limit(request),
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
            self._names[request.id] = self._engine.add_request(request.id, prompt, params)

    def _advance(self) -> list[Generation]:
        finished = [self._generation(output) for output in self._engine.step() if output.finished]
        for generation in finished:
            del self._names[generation.id]
        return finished

    def _forget(self, request_id: str) -> None:
        del self._names[request_id]
        self._engine.abort_request([request_id])

    def _so_far(self, request_id: str) -> Generation:
        from vllm.v1.engine import FinishReason

        state = self._engine.output_processor.request_states[self._names[request_id]]
        # What vLLM itself makes of a request that is aborted; making it changes nothing.
        return self._generation(state.make_request_output([], None, FinishReason.ABORT, None))

    def _load(self, folder: Path, version: Version) -> None:
        check_tensors(folder, self._tensors)  # vLLM only logs a missing tensor, and keeps the old one
        with quiet():
            self._engine.collective_rpc("reload_weights", _RELOAD_S, kwargs={"weights_path": str(folder)})
            if self._on_cpu:
                self._engine.apply_model(_tie_again)
        if self._swaps.mode is Swap.RECOMPUTE and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the caches could not be cleared")
        self._engine.set_weight_version(str(version))

    def _let_go(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine

    def _salt(self) -> str:
        """Without a salt of its own, a version is answered from a prefix cache that older weights filled.

        An engine serves one policy, so that the version says it all.
        """
        return str(self._version)

    def _generation(self, output: Any) -> Generation:
        completion = output.outputs[0]
        runs = []
        for span in completion.weight_versions or ():
            epoch, version = map(int, span.version.split("-"))
            runs.append(VersionRun(epoch, version, span.end - span.start))
        return Generation(
            id=output.request_id,
            tokens=tuple(completion.token_ids),
            logprobs=tuple(completion.logprobs.logprobs),
            versions=tuple(runs),
            finish=_FINISHES.get(completion.finish_reason, Finish.ABORT),
            old_kv=output.request_id in self._old_kv,
        )


def warm_up() -> None:
    """Import vLLM and what it imports when it starts."""
    with quiet():
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
        settings.cache_config.kv_cache_memory_bytes = kv_cache_bytes or kv_bytes(settings)
    engine = LLMEngine.from_vllm_config(settings, disable_log_stats=True)
    engine.renderer.get_eos_token_id()  # says once that there is no tokenizer; let it say so now
    return engine


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
