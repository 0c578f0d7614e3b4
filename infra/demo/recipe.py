"""The demo's settings: small enough for two cores, and learnt from random weights within a few minutes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import tomlkit

from schemas.errors import SettingError
from schemas.names import check_name, nearest

STEPS = 120
ALPHABET = "0123456789>"
MODEL_OPTIONS = ("--layers", "2", "--hidden", "96", "--heads", "3", "--max-positions", "64", "--untied",
                 "--init-std", "0.07", "--rope-theta", "100")  # fmt: skip
POLICY_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
ENGINES = ("vllm", "transformers")


def choose_engine(engine: str) -> str:
    """The engine asked for; vLLM where it is installed when none is. Raises SettingError."""
    installed = importlib.util.find_spec("vllm") is not None
    if not engine:
        return "vllm" if installed else "transformers"
    if engine not in ENGINES:
        raise SettingError(f"--engine {engine!r} is not known to the demo; {nearest(engine, ENGINES)}")
    if engine == "vllm" and not installed:
        raise SettingError(
            "--engine vllm: vLLM is not installed; pip install 'offsetrl[rollout-cpu]', or take --engine transformers"
        )
    return engine


def policy_table(model: str, engine: str, steps: int, place: int) -> dict[str, Any]:
    """Settings of one policy. The second and later ones differ in estimator, batch and pace."""
    own = place == 0
    return {
        "model": model,
        "task": {"environment": "sort-digits", "settings": {"digits": 3}},
        "sampling": {"temperature": 1.0, "max_tokens": 5},
        "dispatch": {
            "group_size": 16,
            "capacity_groups": 48,
            "lifetime_s": 40.0,
            "reissue_after_s": 15.0,
            "heartbeat_timeout_s": 6.0,
        },
        "rollout": {"engine": engine, "concurrency": 256, "max_model_len": 32, "threads": 1},
        "process": {"group_filters": ["zero-spread"], "advantage": "grpo" if own else "rloo"},
        "train": {
            "batch_groups": 16 if own else 12,
            "max_staleness": 2,
            "steps": steps,
            "learning_rate": 1e-3,
            "weight_decay": 1.5,
            "betas": [0.9, 0.95],
            "publish_every": 1 if own else 2,
            "checkpoint_every": 10,
            "threads": 1,
        },
    }


def write(folder: Path, *, run: str, engine: str, policies: int, steps: int, seed: int = 0) -> Path:
    """Write the run's settings file and return its path; `folder` also takes models, servers' data and logs."""
    check_name("run", run)
    names = POLICY_NAMES[:policies]
    data = {
        "run": {"name": run, "seed": seed, "folder": "runs", "partitions": 2, "inboxes": 4},
        "embedded": {"state": "state"},
        "policies": {name: policy_table(f"models/{name}", engine, steps, place) for place, name in enumerate(names)},
    }
    path = folder / f"{run}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# Made by `offsetrl demo`; any command takes it: offsetrl audit --config {path.name}\n" + tomlkit.dumps(data)
    )
    return path
