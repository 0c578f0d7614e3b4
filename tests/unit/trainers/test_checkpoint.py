"""A checkpoint is whole or not there, and training goes on from it as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from schemas.errors import WeightsError
from support.training import make_stepper, random_rows
from trainers import checkpoint
from trainers.backlog import SamplesPosition
from trainers.checkpoint import Meta, newest_eligible, read, save
from trainers.model import weights_digest
from trainers.step import Stepper

TENSORS = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optimizer": {"0.step": torch.tensor(3.0)}}
FILES = ["model.safetensors", "optimizer.safetensors", "meta.json", "COMMIT"]


def meta(version: int = 3, epoch: int = 1, **changes: Any) -> Meta:
    fields: dict[str, Any] = dict(
        run="demo", policy="main", epoch=epoch, version=version, plan_step=version - 1, plan_offset=17, plan_digest="ab" * 32,
        steps_offset=18, samples={0: SamplesPosition(40, 39), 1: SamplesPosition(7, -1)},
    )  # fmt: skip
    return Meta(**fields | changes)


def fine(_: Meta) -> str | None:
    return None


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, meta(), TENSORS, keep=2)
    found = newest_eligible(tmp_path, fine)
    assert found is not None and found.folder == folder and found.meta == meta()
    loaded = found.load()
    assert loaded.keys() == TENSORS.keys()
    assert torch.equal(loaded["model"]["w"], TENSORS["model"]["w"])
    assert loaded["optimizer"]["0.step"].shape == ()


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    assert newest_eligible(tmp_path / "missing", fine) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove", "grow"])
def test_any_harm_to_any_file_makes_the_one_before_it_count(tmp_path: Path, name: str, harm: str) -> None:
    before = save(tmp_path, meta(3), TENSORS, keep=5)
    path = save(tmp_path, meta(4), TENSORS, keep=5) / name
    data = path.read_bytes()
    middle = len(data) // 2
    harmed = {
        "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncate": data[:-1],
        "empty": b"",
        "grow": data + b"\0",
    }
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(harmed[harm])
    with structlog.testing.capture_logs() as logs:
        found = newest_eligible(tmp_path, fine)
    assert found is not None and found.folder == before
    assert [entry["event"] for entry in logs] == ["checkpoint passed over"]
    assert name.split(".")[0] in logs[0]["reason"]


def test_a_flip_between_finding_and_loading_is_refused(tmp_path: Path) -> None:
    found = read(save(tmp_path, meta(), TENSORS, keep=1))
    path = found.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(WeightsError, match="changed"):
        found.load()


@pytest.mark.parametrize("dies_at", ["_write", "_sync_folder", "_rename"])
def test_a_writer_that_dies_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    before = save(tmp_path, meta(3), TENSORS, keep=2)
    real, calls = getattr(checkpoint, dies_at), []

    def die(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2 or dies_at != "_write":
            raise OSError(28, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, dies_at, die)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, meta(4), TENSORS, keep=2)
    found = newest_eligible(tmp_path, fine)
    assert found is not None and found.folder == before
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_leftovers_of_a_killed_writer_are_never_looked_at_and_removed_by_the_next(tmp_path: Path) -> None:
    half = tmp_path / ".tmp-1-deadbeef"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert newest_eligible(tmp_path, fine) is None
    save(tmp_path, meta(), TENSORS, keep=1)
    assert not half.exists()


def test_order_is_by_epoch_then_version_then_save_and_never_by_time(tmp_path: Path) -> None:
    newest = save(tmp_path, meta(3, epoch=10), TENSORS, keep=9)
    save(tmp_path, meta(8, epoch=9), TENSORS, keep=9)
    save(tmp_path, meta(2, epoch=10), TENSORS, keep=9)
    found = newest_eligible(tmp_path, fine)
    assert found is not None and found.folder == newest
    again = save(tmp_path, meta(3, epoch=10, steps_offset=19), TENSORS, keep=9)
    found = newest_eligible(tmp_path, fine)
    assert found is not None and found.folder == again and found.meta.steps_offset == 19


def test_an_objection_passes_over_with_its_reason(tmp_path: Path) -> None:
    save(tmp_path, meta(3), TENSORS, keep=9)
    save(tmp_path, meta(4), TENSORS, keep=9)
    with structlog.testing.capture_logs() as logs:
        found = newest_eligible(tmp_path, lambda m: "its plan does not count" if m.version == 4 else None)
    assert found is not None and found.meta.version == 3
    assert logs[0]["reason"] == "its plan does not count"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in range(1, 6):
        save(tmp_path, meta(version), TENSORS, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck-0001-00000004-1", "ck-0001-00000005-1"]


def test_the_one_just_written_is_never_removed(tmp_path: Path) -> None:
    save(tmp_path, meta(9, epoch=2), TENSORS, keep=1)
    late = save(tmp_path, meta(5, epoch=1), TENSORS, keep=1)
    assert late.is_dir() and len(list(tmp_path.iterdir())) == 2


def train(stepper: Stepper, steps: range) -> str:
    for step in steps:
        stepper.execute(random_rows(6, seed=step), step=step, seed=100 + step)
    return weights_digest(stepper.model)


@pytest.mark.model
@pytest.mark.parametrize("updates", [1, 2])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, updates: int) -> None:
    how: dict[str, Any] = {"updates_per_step": updates, "weight_decay": 0.1, "warmup_steps": 8}
    whole = make_stepper(**how)
    train(whole, range(5))
    save(tmp_path, meta(5), whole.tensors(), keep=1)
    expected = train(whole, range(5, 10))
    found = newest_eligible(tmp_path, fine)
    assert found is not None
    resumed = make_stepper(**how)
    resumed.restore(found.load())
    assert train(resumed, range(5, 10)) == expected
    mine, theirs = whole.tensors(), resumed.tensors()
    assert all(torch.equal(mine[part][name], theirs[part][name]) for part in mine for name in mine[part])


@pytest.mark.model
def test_a_checkpoint_of_the_first_weights_has_no_optimiser_state_yet(tmp_path: Path) -> None:
    stepper = make_stepper()
    save(tmp_path, meta(0), stepper.tensors(), keep=1)
    found = newest_eligible(tmp_path, fine)
    assert found is not None
    resumed = make_stepper()
    train(resumed, range(1))
    resumed.restore(found.load())
    assert train(resumed, range(3)) == train(stepper, range(3))
