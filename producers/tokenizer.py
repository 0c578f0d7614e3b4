"""A tokenizer from a model's folder: text to token ids for prompts, sampled ids to text for environments.

Knows: transformers' AutoTokenizer (this and the light engine are its only users here), which files a tokenizer is made
of, and which ids end a generation. Loads local files only and runs no code from the folder. What the model wrote is
never encoded again: trajectories carry the ids that were sampled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import SettingError

FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Names that a tokenizer's files may have; a folder holds some of them."""


def tokenizer_digest(folder: Path) -> str:
    """SHA-256, in hex, over the names and bytes of the tokenizer files in a folder.

    Raises SettingError when there is none.
    """
    names = [name for name in FILES if (folder / name).is_file()]
    if not names:
        raise SettingError(f"{folder} holds no tokenizer: expected tokenizer.json beside the model's config.json")
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n{hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a generation, ascending: those of generation_config.json, else of config.json; may be empty."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(sorted({found} if isinstance(found, int) else set(found)))
    return ()


class Tokenizer:
    """Text to ids and back, with the digest that trajectories carry."""

    digest: str
    """Of the tokenizer's files (`tokenizer_digest`)."""
    eos_ids: tuple[int, ...]
    """Ids that end a generation."""
    end_id: int | None
    """The one of them that an answer is taught to end with: the tokenizer's own where it has one; None without any."""

    def __init__(self, folder: Path) -> None:
        self.digest = tokenizer_digest(folder)
        self._auto = _load(folder)
        own = self._auto.eos_token_id
        self.eos_ids = eos_ids(folder) or (() if own is None else (int(own),))
        self.end_id = int(own) if own in self.eos_ids else next(iter(self.eos_ids), None)
        self._cached = functools.lru_cache(maxsize=4096)(self._encode)  # siblings of a group share their prompt

    def encode(self, text: str, *, first: bool = True) -> tuple[int, ...]:
        """Ids of a text; with `first`, the special tokens that the model expects before a prompt (often none) as well.

        Raises ValueError, naming them, for characters that the tokenizer would drop or replace.
        """
        return self._cached(text, first)

    def decode(self, tokens: Sequence[int]) -> str:
        """What the model wrote: one closing end token is dropped, any other special token stays visible."""
        kept = list(tokens[:-1] if tokens and tokens[-1] in self.eos_ids else tokens)
        return str(self._auto.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def end_text(self, token: int) -> str:
        """Text of an id that ends a generation; empty for any other id."""
        return str(self._auto.decode([token], skip_special_tokens=False)) if token in self.eos_ids else ""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The text of a conversation, by the model's own chat template; begin-of-text included.

        With `answer`, it ends where the model is to answer. Encode it with `first=False`. Raises ValueError when the
        tokenizer has no template, and whatever the template raises.
        """
        return str(self._auto.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer))

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        ids = self._auto(text, add_special_tokens=first, return_attention_mask=False)["input_ids"]
        plain = self._auto(text, add_special_tokens=False)["input_ids"] if first else ids
        if self._auto.decode(plain, clean_up_tokenization_spaces=False) != text:
            self._check_known(text)
        return tuple(ids)

    def _check_known(self, text: str) -> None:
        """Some tokenizers tidy text on purpose; only characters without an id of their own are refused."""
        unknown = self._auto.unk_token_id
        spelled = {character: self._auto(character, add_special_tokens=False)["input_ids"] for character in set(text)}
        lost = sorted(character for character, ids in spelled.items() if not ids or unknown in ids)
        if lost:
            raise ValueError(
                f"the tokenizer has no token for {''.join(lost)!r} in {text[:80]!r}: "
                "use a model whose alphabet holds these characters, or change the prompt"
            )


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer  # slow to import: seconds

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise SettingError(f"the tokenizer in {folder} does not load: {error}") from error
