"""Several processes over gloo train as one: the same gradient, the same decisions, and they end together."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from infra.embedded.ports import HOST, find_free
from infra.memory_store import MemoryStore
from schemas.errors import SettingError
from support.loop import append, make_log
from support.points import start_trainer, train
from support.training import (
    CASES,
    SAME_GRADIENT,
    SHARDED_CASES,
    gradient_error,
    gradients_of,
    ranks_settings,
    rows_of_case,
    stepper_of_case,
    training_outcomes,
)
from trainers import checkpoint
from trainers.batching import deal, micro_batches
from trainers.launch import place_of
from trainers.model import weights_digest

pytestmark = pytest.mark.model

TESTS = Path(__file__).parents[2]
MAIN = TESTS / "support" / "rank_main.py"


def start_ranks(scene: str, folder: Path, size: int = 2) -> list[subprocess.Popen[str]]:
    """The processes of a scene of `support.rank_main`."""
    (port,) = find_free(1)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    shared = {
        **os.environ, "PYTHONPATH": paths, "WORLD_SIZE": str(size), "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, str(MAIN), scene, str(folder)], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(processes: Sequence[subprocess.Popen[str]], limit_s: float = 240.0) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks made of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    ends = finish(start_ranks("gradients", folder))
    assert [code for code, _ in ends] == [0, 0], ends
    return folder


@pytest.fixture(scope="module")
def of_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks made of some cases, each holding half of the weights."""
    folder = tmp_path_factory.mktemp("shards")
    ends = finish(start_ranks("shards", folder))
    assert [code for code, _ in ends] == [0, 0], ends
    return folder


@functools.cache
def of_one(name: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and figures of a case in this process."""
    stepper = stepper_of_case(CASES[name])
    figures = stepper.execute(rows_of_case(CASES[name]), step=0, seed=0).as_dict()
    return gradients_of(stepper), figures


def figures_of(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / f"figures-{rank}.json").read_text())
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("poisoned", "nothing-trainable")])
def test_two_ranks_take_the_gradient_of_one_whatever_the_micro_batches(of_two: Path, name: str) -> None:
    """All micro-batch splits of a reduction are compared with the same step: one rank, one micro-batch."""
    whole = f"{name.rpartition('-')[0]}-10000"
    gradients, figures = of_one(whole if whole in CASES else name)
    assert gradient_error(safetensors.torch.load_file(of_two / name), gradients) <= SAME_GRADIENT
    assert figures_of(of_two, 0)[name]["figures"] == pytest.approx(figures, rel=1e-3, abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in SHARDED_CASES if name not in ("bfloat16-60", "poisoned")])
def test_shards_take_the_gradient_of_whole_weights_and_come_back_from_a_checkpoint(of_shards: Path, name: str) -> None:
    gradients, figures = of_one(name)
    assert gradient_error(safetensors.torch.load_file(of_shards / name), gradients) <= SAME_GRADIENT
    entry, other = figures_of(of_shards, 0)[name], figures_of(of_shards, 1)[name]
    assert entry["figures"] == pytest.approx(figures, rel=1e-3, abs=1e-5)
    assert entry["again"] and entry["left"] and entry["digest"] == other["digest"]


@pytest.mark.prove
def test_shards_computed_with_in_bfloat16_are_float32_and_follow_the_gradient_of_float32(of_shards: Path) -> None:
    """FSDP2 keeps activations in bfloat16 too, autocast their sums in float32: each is about 1 % away from float32."""
    expected, figures = of_one("everything-60")
    found = safetensors.torch.load_file(of_shards / "bfloat16-60")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert gradient_error(found, expected) < 0.05
    entry, other = figures_of(of_shards, 0)["bfloat16-60"], figures_of(of_shards, 1)["bfloat16-60"]
    assert entry["figures"]["kl"] == pytest.approx(figures["kl"], rel=0.05)
    assert entry["again"] and entry["left"] and entry["digest"] == other["digest"]


@pytest.mark.prove
def test_shards_skip_what_whole_weights_skip(of_shards: Path) -> None:
    entry = figures_of(of_shards, 0)["poisoned"]
    untouched = weights_digest(stepper_of_case(CASES["poisoned"]).model)
    assert (entry["digest"], entry["figures"]["updates_skipped"]) == (untouched, 1)


def test_all_ranks_hold_the_same_weights_and_report_the_same_figures(of_two: Path) -> None:
    first, second = figures_of(of_two, 0), figures_of(of_two, 1)
    assert {name: entry["digest"] for name, entry in first.items()} == {n: e["digest"] for n, e in second.items()}
    for name in set(CASES) - {"poisoned"}:
        assert first[name]["figures"] == second[name]["figures"], name
    assert all(entry["left"] for entry in (*first.values(), *second.values()))


@pytest.mark.parametrize("name", ["poisoned", "nothing-trainable"])
def test_a_step_that_cannot_be_taken_is_skipped_by_all_ranks_alike(of_two: Path, name: str) -> None:
    untouched = weights_digest(stepper_of_case(CASES[name]).model)
    for rank in (0, 1):
        entry = figures_of(of_two, rank)[name]
        assert (entry["digest"], entry["figures"]["updates_skipped"]) == (untouched, 1)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(folder).load()["model"]


def weights_of_one_rank(folder: Path) -> dict[str, torch.Tensor]:
    """After the same four steps in this process."""
    settings = ranks_settings(folder, ranks=1)
    log = make_log(settings)
    for partition in (0, 1):
        append(log, "samples", *training_outcomes(partition), partition=partition)
    train(start_trainer(log, MemoryStore(), settings, lambda name: None), 4)
    return weights_in(max((folder / "demo" / "main" / "checkpoints").iterdir()))


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what two ranks have trained: a run `whole`, and one that was `stopped` in the middle of a step."""
    folder = tmp_path_factory.mktemp("train")
    ends = finish(start_ranks("train", folder))
    assert [code for code, _ in ends] == [0, 0], ends
    return folder


def said_of(folder: Path, name: str) -> dict[str, list[str]]:
    """Digests of a run's steps, and the checkpoints that its first trainer left."""
    found: dict[str, list[str]] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_two_ranks_plan_train_begin_anew_from_a_checkpoint_and_come_out_near_one(
    trained_by_two: Path, tmp_path: Path
) -> None:
    assert len(said_of(trained_by_two, "whole")["digests"]) == 4
    kept = sorted(path.name for path in (trained_by_two / "whole" / "main" / "checkpoints").iterdir())
    assert kept == ["ck-0001-00000002-1", "ck-0002-00000004-1"], "the other rank followed from one claim to the next"
    found, alone = (
        weights_in(trained_by_two / "whole" / "main" / "checkpoints" / kept[-1]),
        weights_of_one_rank(tmp_path / "alone"),
    )
    differences = torch.cat([(found[name] - alone[name]).abs().flatten() for name in alone])
    assert found.keys() == alone.keys()
    assert differences.mean() < 1e-5, "rounding alone: four steps at rate 1e-3 move weights by about 4e-3"


def test_all_ranks_leave_a_step_at_one_place_and_its_plan_is_executed_again_to_the_same_bits(
    trained_by_two: Path,
) -> None:
    whole, stopped = said_of(trained_by_two, "whole"), said_of(trained_by_two, "stopped")
    assert stopped["kept"] == ["ck-0000-00000000-1", "ck-0001-00000001-1"], "saved without the step that was left"
    assert stopped["digests"] == whole["digests"] and len(set(whole["digests"])) == 4


def test_a_rank_that_ends_before_all_have_met_is_named_with_its_exit_code(tmp_path: Path) -> None:
    """Long before the meeting's limit of 600 s, which the test would not outlive."""
    ((code, output),) = finish(start_ranks("absent", tmp_path, size=1), limit_s=120.0)
    assert code == 3, output
    assert "RankLost: rank 1 (pid " in output and "ended with exit code 7" in output


def test_when_a_rank_dies_the_trainer_ends_and_says_so(tmp_path: Path) -> None:
    leader, dead = finish(start_ranks("die", tmp_path))
    assert dead[0] == 9
    assert leader[0] == 3, leader
    assert "RankLost: rank 0 of 2 lost another rank at" in leader[1]
    assert not (tmp_path / "whole.json").exists()


def test_micro_batches_are_dealt_evenly_and_what_is_missing_weighs_nothing() -> None:
    batches = micro_batches(rows_of_case({}), 60)
    for size in (1, 2, 3, 50):
        shares = [deal(batches, rank, size) for rank in range(size)]
        assert {len(share) for share in shares} == {-(-len(batches) // size)}
        assert sum(batch.num_trainable for share in shares for batch in share) == sum(b.num_trainable for b in batches)


def test_ranks_of_a_launcher_and_of_the_settings_must_agree() -> None:
    from infra.train_settings import TrainTable

    with pytest.raises(SettingError, match=r"train\.ranks is 2, but a launcher started 4 ranks"):
        place_of(TrainTable(ranks=2), {"RANK": "1", "WORLD_SIZE": "4"})
