"""Asynchronous training is not inferior to synchronous training: five paired seeds, two tasks, equal trained tokens.

The bound is on the lower 95 % limit of the paired difference in held-out reward. The table, printed and kept in the
study's folder, also shows what leaving the correction out does. About an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from e2e.conftest import end
from producers.environments.reasoning_gym_tasks import reasoning_gym_tasks
from producers.splits import Split
from support.demo import Home
from support.paired import ARMS, ASYNCHRONOUS, SYNCHRONOUS, Study, after, before, difference, pair, table

pytestmark = [pytest.mark.prove, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(5400)]

SEEDS = (1, 2, 3, 4, 5)
MARGIN = -0.03
LEAST_GAIN = 0.2
TOKENS_APART = 0.02
"""The last step of an arm goes a little beyond the tokens that are asked for."""

SHAPE = ("--layers", "2", "--hidden", "96", "--heads", "3", "--max-positions", "64", "--untied", "--init-std", "0.07",
         "--rope-theta", "100")  # fmt: skip
COMMON = {
    "dispatch": {
        "group_size": 16, "capacity_groups": 96, "lifetime_s": 120.0, "reissue_after_s": 60.0, "heartbeat_timeout_s": 20.0
    },
    "rollout": {"engine": "transformers", "concurrency": 256, "max_model_len": 48, "threads": 1},
    # Groups of equal rewards teach nothing, but drawing others in their place would cost the arms different rollouts.
    "process": {"group_filters": [], "advantage": "grpo"},
}  # fmt: skip
TRAIN = {
    "batch_groups": 16, "learning_rate": 2e-4, "betas": [0.9, 0.95], "entropy_coefficient": 0.01, "checkpoint_every": 100,
    "threads": 1, "trackers": [],
}  # fmt: skip

SORT_DIGITS = Study(
    name="sort-digits",
    model=("--alphabet", "0123456789>", *SHAPE),
    policy={
        **COMMON,
        "task": {"environment": "sort-digits", "settings": {"digits": 2}},
        "sampling": {"max_tokens": 4},
        "train": {**TRAIN, "weight_decay": 1.5, "tokens": 230_000},
    },
)

EQUATIONS = {
    "task": "simple_equations",
    "config": {
        "min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 5, "operators": ["+"], "operators_weights": [1.0]
    },
    "template": "{equation} > ",
    "strict": True,
}  # fmt: skip
HELD_OUT = 0.1
WARM_BATCH, WARM_STEPS = 128, 14


def _demonstrations(seed: int) -> list[dict[str, str]]:
    """Equations of the training split, with their answers."""
    environment = reasoning_gym_tasks(seed, **EQUATIONS)  # type: ignore[arg-type]
    split = Split(environment.num_items, seed, HELD_OUT)
    sessions = [environment.open(split.training(place), "", 0) for place in range(WARM_BATCH * WARM_STEPS)]
    return [{"prompt": session.prompt, "completion": session.entry["answer"]} for session in sessions]


SIMPLE_EQUATIONS = Study(
    name="simple-equations",
    model=("--alphabet", "abcdefghijklmnopqrstuvwxyz0123456789*+-= >", *SHAPE),
    policy={
        **COMMON,
        "task": {"environment": "reasoning-gym", "settings": EQUATIONS},
        "sampling": {"max_tokens": 4},
        "eval": {"share": HELD_OUT},
        "train": {**TRAIN, "weight_decay": 0.1, "tokens": 100_000},
    },
    demonstrations=_demonstrations,
    warm={
        "process": {"group_filters": [], "advantage": "reward"},
        "train": {
            "loss": "supervised", "correction": "none", "max_staleness": 0, "batch_groups": WARM_BATCH,
            "steps": WARM_STEPS, "learning_rate": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "trackers": [],
        },
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A folder with servers of its own."""
    home = Home(tmp_path_factory.mktemp("studies"))
    config = home.folder / "servers.toml"
    config.write_text(
        tomlkit.dumps({"run": {"name": "servers"}, "embedded": {"state": str(home.folder / "state")},
                       "policies": {"main": {"model": "none"}}})
    )  # fmt: skip
    home.command("up", "--config", str(config)).expect()
    yield home
    end(home)


@pytest.mark.parametrize("study", [SORT_DIGITS, SIMPLE_EQUATIONS], ids=lambda study: str(study.name))
def test_asynchronous_training_is_not_inferior(studies: Home, study: Study) -> None:
    scores = {}
    for seed in SEEDS:
        scores[seed] = pair(studies, study, seed)
        print(table({seed: scores[seed]}), flush=True)
    report = table(scores)
    Path(studies.folder / f"{study.name}.txt").write_text(report)
    print(report)
    for by_arm in scores.values():
        counts = [by_arm[arm.name].tokens for arm in ARMS]
        assert max(counts) <= min(counts) * (1 + TOKENS_APART), report
        assert by_arm[ASYNCHRONOUS.name].mean_age > 1, "the asynchronous arm really trained on old tokens"
    gains = [late - early for early, late in zip(before(scores, SYNCHRONOUS), after(scores, SYNCHRONOUS), strict=True)]
    assert sum(gains) / len(gains) >= LEAST_GAIN, report
    assert difference(after(scores, ASYNCHRONOUS), after(scores, SYNCHRONOUS)).low >= MARGIN, report
