"""Asks AReaL 1.0.4's StalenessManager how many rollouts it would admit, and freezes its answers: `fixtures/admission.json`.

Needs AReaL's source only, in a folder of its own, never in the project's environment; its dependencies are left aside:

    python -m pip install --no-deps --target oracle-areal areal==1.0.4
    PYTHONPATH=oracle-areal python tests/oracle/make_admission.py
    PYTHONPATH=oracle-areal python -m pytest -m oracle tests/oracle

What is asked for are histories in which nothing is dropped after it was accepted, since AReaL counts whatever was ever
accepted, where we count what waits.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "unit" / "schemas" / "fixtures" / "admission.json"
NUM_HISTORIES = 12
NUM_EVENTS = 120


def _rollout_stat() -> SimpleNamespace:
    """What the manager counts with, as `areal.api` has it."""
    return SimpleNamespace(enqueued=0, accepted=0, running=0, rejected=0)


def manager_class() -> Any:
    """`StalenessManager`, loaded from its file alone: the package's imports bring torch, ray and more."""
    spec = importlib.util.find_spec("areal")
    assert spec is not None and spec.submodule_search_locations, "areal is not on the path"
    path = Path(spec.submodule_search_locations[0]) / "infra" / "staleness_manager.py"
    kept = {name: sys.modules.get(name) for name in ("areal", "areal.api")}
    api = ModuleType("areal.api")
    api.RolloutStat = _rollout_stat  # type: ignore[attr-defined]  # a stand-in for the one name it imports
    sys.modules["areal"], sys.modules["areal.api"] = ModuleType("areal"), api
    try:
        found = importlib.util.spec_from_file_location("areal_staleness_manager", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        for name, before in kept.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
    return module.StalenessManager


def make() -> dict[str, Any]:
    """Everything that is frozen."""
    return {
        "by": "tests/oracle/make_admission.py",
        "areal": "1.0.4",
        "histories": [_history(random.Random(seed)) for seed in range(NUM_HISTORIES)],
    }


def _history(rng: random.Random) -> dict[str, Any]:
    """Events with the capacity that the manager sees after each; some histories begin at a recovered version."""
    batch, eta, capacity = rng.randint(1, 8), rng.randint(0, 4), rng.randint(1, 40)
    trainer = SimpleNamespace(version=0)
    trainer.get_version = lambda: trainer.version
    manager = manager_class()(trainer, capacity, batch, eta)
    first = rng.choice((0, 0, 7))
    if first:
        trainer.version = first
        manager.on_version_recovered(first)
    waiting, running, events, answers = 0, 0, [], [manager.get_capacity()]
    for _ in range(NUM_EVENTS):
        able = ["submit"] * 2 * (manager.get_capacity() > 0) + ["accept", "accept", "reject"] * (running > 0)
        event = rng.choice(able + ["step"] * (waiting >= batch))
        if event == "submit":
            manager.on_rollout_enqueued()
            manager.on_rollout_submitted()
            running += 1
        elif event == "accept":
            manager.on_rollout_accepted()
            running, waiting = running - 1, waiting + 1
        elif event == "reject":
            manager.on_rollout_rejected()
            running -= 1
        else:
            trainer.version, waiting = trainer.version + 1, waiting - batch
        events.append(event)
        answers.append(manager.get_capacity())
    return {
        "batch": batch, "eta": eta, "capacity": capacity, "first_version": first, "events": events, "answers": answers,
    }  # fmt: skip


def text(frozen: dict[str, Any]) -> str:
    """As JSON, a list of plain values on a line of its own."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(frozen, indent=1)) + "\n"


if __name__ == "__main__":
    FIXTURES.parent.mkdir(exist_ok=True)
    FIXTURES.write_text(text(make()), "utf-8")
    sys.stdout.write(f"{FIXTURES} written\n")
