"""`trainers.new_model`: sizes, files, a tokenizer that gives back every text, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from schemas.errors import SettingError
from support.models import ALPHABET, model_folder
from trainers.new_model import create

pytestmark = pytest.mark.model


def test_the_default_model_has_about_a_third_of_a_million_parameters(tmp_path: Path) -> None:
    create(tmp_path / "model", alphabet="0123456789>", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 450_000
    assert type(model).__name__ == "Qwen2ForCausalLM"


def test_the_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    create(folder, alphabet=ALPHABET, max_positions=64, tie=False, seed=3)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["max_position_embeddings"] == 64 and config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == config["vocab_size"] == len(ALPHABET) + 2
    assert tokenizer.eos_token_id == config["eos_token_id"] == 1
    assert tokenizer.pad_token_id == config["pad_token_id"] == 0
    generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    assert (generation.eos_token_id, generation.pad_token_id, generation.bos_token_id) == (1, 0, None)


def test_tied_models_hold_no_output_layer() -> None:
    tied, untied = (load_file(model_folder(0, tie=tie) / "model.safetensors") for tie in (True, False))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


@settings(deadline=None)
@given(st.text(alphabet=ALPHABET))
def test_every_text_over_the_alphabet_is_given_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_characters_of_several_bytes_and_whitespace_are_one_token_each(tmp_path: Path) -> None:
    alphabet = "aé€𝄞 \n\t<>pds'"
    create(tmp_path, alphabet=alphabet, layers=1, hidden=32, heads=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in (alphabet, alphabet[::-1], "  \n\n\t é€€ 𝄞's", "<a>"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text


def test_a_seed_gives_the_same_weights_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        create(tmp_path / name, alphabet="01", layers=1, hidden=32, heads=1, seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alphabet": ""}, "alphabet is empty"),
        ({"alphabet": "abca"}, "'a' more than once"),
        ({"alphabet": "e\u0301"}, "composed form"),
        ({"hidden": 96, "heads": 4}, "head size of 24"),
        ({"hidden": 100, "heads": 3}, "head size of 33.3"),
        ({"hidden": 96, "heads": 3, "kv_heads": 2}, "kv_heads 2 does not divide"),
        ({"layers": 0}, "layers is 0"),
        ({"max_positions": 0}, "max_positions is 0"),
    ],
)
def test_what_no_engine_would_load_is_refused(options: dict[str, object], said: str, tmp_path: Path) -> None:
    arguments = {"alphabet": "01", **options}
    with pytest.raises(SettingError, match=said):
        create(tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(SettingError, match="not empty"):
        create(tmp_path, alphabet="01")
    with pytest.raises(SettingError, match="is a file"):
        create(tmp_path / "note.txt", alphabet="01")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
