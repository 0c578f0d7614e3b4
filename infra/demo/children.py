"""The demo's child processes: the one that makes the model, and the daemons."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.demo import recipe
from infra.demo.run import Run
from infra.supervisor import ChildSpec
from schemas.errors import SettingError


def make_model(folder: Path, seed: int) -> None:
    """A small model with random weights; made in a process of its own, since this one needs no torch."""
    if (folder / "config.json").exists():
        return
    argv = [sys.executable, "-m", "infra.cli.main", "model", "new", str(folder), "--alphabet", recipe.ALPHABET]
    argv += [*recipe.MODEL_OPTIONS, "--seed", str(seed)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise SettingError(f"the demo's model could not be made in {folder}: {done.stderr.strip()[-2000:]}")


def children(demo: Run, overrides: Sequence[str]) -> list[ChildSpec]:
    """Per policy a trainer, a rollout worker, a processor, a dispatcher and, where versions are measured, an evaluator."""
    logs = demo.folder / "logs" / demo.name
    logs.mkdir(parents=True, exist_ok=True)
    settings = [part for override in overrides for part in ("--set", override)]
    return [
        ChildSpec(
            name=f"{role}-{policy}",
            argv=[sys.executable, "-m", "infra.cli.main", role, "--config", str(demo.config), "--policy", policy,
                  "--name", f"{role}-{policy}", *(["--follow"] if role == "eval" else []), *settings],
            env={"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            log_path=logs / f"{role}-{policy}.log",
        )
        for policy, table in demo.settings.policies.items()
        for role in ("train", "rollout", "process", "dispatch", *(["eval"] if table.eval.every else []))
    ]  # fmt: skip
