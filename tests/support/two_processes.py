"""A program: vLLM with its model spread over two worker processes; prints, as JSON, how far it is from transformers.

Runs alone, for vLLM reads its environment once, and starts its workers by running the main module again.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from infra.settings import RolloutTable
from producers.engines import make_engine
from schemas.records import Version
from support.engine_bench import Bench, deviation, deviation_of_one, prompt_of
from support.models import POSITIONS, logprobs_over_a_swap, token_logprobs


def main() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    bench = Bench("vllm", tie=True)
    table = RolloutTable(max_model_len=POSITIONS, concurrency=4, engine_settings={"tensor_parallel": 2})
    bench.use(make_engine("vllm", folder=bench.folder, version=Version(1, 0), table=table))
    try:
        found: dict[str, Any] = {"before": deviation_of_one(bench, prompt_of(9))}
        old = bench.folder
        bench.submit("across", prompt_of(9), seed=1, max_tokens=30)
        for _ in range(2):
            bench.engine.step()
        bench.swap(1)
        across = bench.drain()["across"]
        wanted = logprobs_over_a_swap(old, bench.folder, prompt_of(9), across.tokens, across.versions[0].count)
        found["across"] = deviation(across, wanted)
        found["versions"] = [run.version for run in across.versions]
        found["after"] = deviation_of_one(bench, prompt_of(9))
        found["apart"] = deviation(across, token_logprobs(old, prompt_of(9), across.tokens))
    finally:
        bench.close()
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
