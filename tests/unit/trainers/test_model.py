"""A policy's log-probs against transformers alone, and its files against what was loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from schemas.errors import SettingError, WeightsError
from support.models import model_folder
from support.models import token_logprobs as reference_logprobs
from support.training import make_row, random_rows
from trainers.batching import pad
from trainers.model import load_policy, model_tensors, restore_model, token_logprobs, weights_bytes, weights_digest

pytestmark = pytest.mark.model

PROMPT, ANSWER = [3, 4, 5, 12], [3, 4, 5, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_transformers_at_the_rows_own_temperature(temperature: float) -> None:
    folder = model_folder()
    row = make_row([*PROMPT, *ANSWER], [0] * 4 + [1] * 4, temperature=temperature)
    other = make_row([7, 8, 9, 10, 11, 12, 13, 14, 2, 3, 4], [0] * 5 + [1] * 6, temperature=2.0)
    found = token_logprobs(load_policy(folder), pad([row, other]))
    assert found.shape == (2, 11)
    assert found[0, 4:8].tolist() == pytest.approx(reference_logprobs(folder, PROMPT, ANSWER, temperature), abs=1e-5)
    assert found[0, :4].tolist() == [0, 0, 0, 0]


def test_batch_mates_and_padding_do_not_change_a_rows_log_probs() -> None:
    model = load_policy(model_folder())
    rows = random_rows(6)
    together = token_logprobs(model, pad(rows))
    for i, row in enumerate(rows):
        alone = token_logprobs(model, pad([row]))
        mask = torch.from_numpy(row.mask_T)
        torch.testing.assert_close(together[i, : len(mask)][mask], alone[0][mask], atol=1e-5, rtol=0)


def test_a_batch_with_nothing_trainable_asks_nothing_of_the_model() -> None:
    found = token_logprobs(load_policy(model_folder()), pad([make_row([3, 4], [0, 0])]))
    assert torch.equal(found, torch.zeros(1, 2))


@pytest.mark.parametrize("tie", [True, False])
def test_published_files_hold_the_names_and_values_of_the_folder(tie: bool) -> None:
    folder = model_folder() if tie else model_folder(tie=False)
    model = load_policy(folder)
    files = weights_bytes(model)
    assert list(files) == ["model.safetensors"]
    mine, theirs = (
        safetensors.torch.load(files["model.safetensors"]),
        safetensors.torch.load_file(folder / "model.safetensors"),
    )
    assert mine.keys() == theirs.keys()
    assert ("lm_head.weight" in mine) is not tie
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_sharded_files_load_as_the_same_model(tmp_path: Path) -> None:
    model = load_policy(model_folder())
    files = weights_bytes(model, max_shard_bytes=100_000)
    names = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert set(json.loads(files["model.safetensors.index.json"])["weight_map"].values()) == set(names)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model_folder() / name).read_bytes())
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert weights_digest(load_policy(tmp_path)) == weights_digest(model)


def test_the_digest_sees_one_flipped_bit_and_nothing_else() -> None:
    model, same = load_policy(model_folder()), load_policy(model_folder())
    assert weights_digest(model) == weights_digest(same)
    parameter = next(same.parameters()).data
    parameter.view(-1)[5] = np.nextafter(parameter.view(-1)[5].item(), 10, dtype=np.float32).item()
    assert weights_digest(model) != weights_digest(same)


def test_the_digest_sees_the_dtype() -> None:
    assert weights_digest(load_policy(model_folder(), dtype="bfloat16")) != weights_digest(load_policy(model_folder()))


def test_tensors_come_back_in_place_and_keep_the_tie() -> None:
    model, other = load_policy(model_folder()), load_policy(model_folder(1))
    restore_model(model, model_tensors(other))
    assert weights_digest(model) == weights_digest(other)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]


def test_tensors_of_another_model_are_refused() -> None:
    with pytest.raises(WeightsError, match="another model"):
        restore_model(load_policy(model_folder()), model_tensors(load_policy(model_folder(layers=1))))
    with pytest.raises(WeightsError, match="bfloat16"):
        restore_model(load_policy(model_folder()), model_tensors(load_policy(model_folder(), dtype="bfloat16")))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"config\.json"):
        load_policy(tmp_path)
