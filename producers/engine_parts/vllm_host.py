"""What the process around vLLM sees to: how much memory keys and values may take, and that a healthy engine is quiet.

Speaks no vLLM: that is `vllm_engine.py` alone.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

_KV_LIMIT_BYTES = 1 << 30


def kv_bytes(settings: Any) -> int:
    """Keys and values of all requests at full length, and a quarter more; clearing memory costs start-up time."""
    model, parallel, block = settings.model_config, settings.parallel_config, settings.cache_config.block_size
    values_per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    one = -(-model.max_model_len // block) * block * values_per_token * model.dtype.itemsize
    wanted = one * (settings.scheduler_config.max_num_seqs + 1) * 5 // 4
    return int(max(min(wanted, _KV_LIMIT_BYTES), 2 * one))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
