"""`producers.tokenizer`: ids and text, end tokens, the digest, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.tokenizer import Tokenizer, eos_ids, tokenizer_digest
from schemas.errors import SettingError
from support.models import ALPHABET, model_folder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_folder())


@given(text=st.text(alphabet=ALPHABET))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_one_closing_end_token_is_dropped_and_nothing_else(tokenizer: Tokenizer) -> None:
    (one,) = tokenizer.encode("1")
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.decode([one, 1]) == "1"
    assert tokenizer.decode([one, 1, 1]) == "1<eos>"
    assert tokenizer.decode([0, one, 0]) == "<pad>1<pad>"  # padding that was sampled must not pass for nothing
    assert tokenizer.decode([1]) == tokenizer.decode([]) == ""


def test_characters_without_a_token_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token for 'XY' in '1X2YX'"):
        tokenizer.encode("1X2YX")


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert eos_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2, 9]}))
    assert eos_ids(tmp_path) == (2, 9)


def test_the_digest_covers_the_tokenizers_files_alone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    digest = tokenizer_digest(folder)
    assert digest == tokenizer_digest(model_folder(1)) == Tokenizer(folder).digest
    (folder / "README.md").write_text("hello")
    assert tokenizer_digest(folder) == digest
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(folder) != digest


def test_a_chat_template_is_followed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}>")
    assert Tokenizer(folder).chat([{"role": "user", "content": "31"}]) == "31>"
    with pytest.raises(ValueError, match="chat_template"):
        Tokenizer(model_folder()).chat([{"role": "user", "content": "31"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="holds no tokenizer"):
        Tokenizer(tmp_path)
    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SettingError, match="does not load"):
        Tokenizer(folder)
