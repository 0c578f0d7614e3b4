"""A small causal language model with random weights and a character tokenizer, written in the Hugging Face layout.

Knows: the Qwen2 architecture, which head sizes vLLM's CPU attention accepts, and how to make a tokenizer that gives
back every text over its alphabet exactly. Needs no network. Used by `offsetrl model new`, by the demo and by tests.
"""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from schemas.errors import SettingError
from trainers.model import quiet

PAD, EOS = "<pad>", "<eos>"
"""Special tokens: ids 0 and 1."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention accepts."""


def create(
    folder: Path,
    *,
    alphabet: str,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    max_positions: int = 256,
    tie: bool = True,
    init_std: float = 0.0,
    rope_theta: float = 10_000.0,
    seed: int = 0,
) -> None:
    """Write a model of about 0.3 M parameters (by default) into a new or empty folder.

    Two wide layers learn short tasks sooner than four narrow ones of the same size, and run faster.

    `kv_heads` defaults to `heads`, `intermediate` to twice `hidden`, `init_std` to half of hidden ** -0.5. The same
    arguments give the same weights. Raises SettingError, before anything is written, for a folder that is not empty and
    for sizes that no engine would load.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    intermediate = 2 * hidden if intermediate is None else intermediate
    check_folder(folder)
    _check_alphabet(alphabet)
    _check_sizes(layers, hidden, heads, kv_heads, max_positions)
    tokenizer = _tokenizer(alphabet, max_positions)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # the usual 0.02 leaves so narrow a model nearly uniform for many steps
        initializer_range=init_std or hidden**-0.5 / 2,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        dtype="float32",
    )
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        _random_model(config, seed).save_pretrained(folder)  # writes generation_config.json from the same ids
    tokenizer.save_pretrained(folder)


def _random_model(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def _tokenizer(alphabet: str, max_positions: int) -> Qwen2Tokenizer:
    """One token per character, and back.

    transformers loads the tokenizer of every folder whose model type is qwen2 as Qwen2Tokenizer, whatever class the
    folder names. So this is a real one: byte-level, with merges for nothing but the bytes of one character.
    """
    vocabulary, merges = _byte_pairs(alphabet)
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,  # never produced; left out, a default would be added beyond the model's vocabulary
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _byte_pairs(alphabet: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: a character of several bytes grows from its first byte by one merge per further byte."""
    spell = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    vocabulary = {PAD: 0, EOS: 1}
    merges: dict[tuple[str, str], None] = {}
    for character in alphabet:
        symbols = spell(character)[0][0]
        for symbol in symbols:
            vocabulary.setdefault(symbol, len(vocabulary))
        for end in range(1, len(symbols)):
            merges[symbols[:end], symbols[end]] = None
            vocabulary.setdefault(symbols[: end + 1], len(vocabulary))
    return vocabulary, list(merges)


def check_folder(folder: Path) -> None:
    """Raise SettingError unless a model may be written there: the folder is empty or does not exist yet."""
    if folder.is_dir() and any(folder.iterdir()):
        raise SettingError(f"{folder} is not empty, and a model never overwrites files: name a new folder or empty it")
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file: name a new folder for the model")


def _check_alphabet(alphabet: str) -> None:
    if not alphabet:
        raise SettingError("the alphabet is empty: give every character that prompts and answers may hold")
    doubled = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if doubled:
        raise SettingError(f"the alphabet holds {''.join(doubled)!r} more than once: give each character once")
    for pair in itertools.product(alphabet, repeat=2):
        if not unicodedata.is_normalized("NFC", text := "".join(pair)):
            raise SettingError(
                f"{text!r} has a composed form (Unicode NFC), in which the tokenizer would read it: "
                "put composed characters into the alphabet instead"
            )


def _check_sizes(layers: int, hidden: int, heads: int, kv_heads: int, max_positions: int) -> None:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "max_positions": max_positions}
    for name, size in sizes.items():
        if size < 1:
            raise SettingError(f"{name} is {size}; it must be at least 1")
    if hidden % heads or hidden // heads not in HEAD_SIZES:
        raise SettingError(
            f"hidden {hidden} over {heads} heads gives a head size of {hidden / heads:g}; "
            f"vLLM on CPU takes {', '.join(map(str, HEAD_SIZES))}: change hidden or heads"
        )
    if heads % kv_heads:
        raise SettingError(f"kv_heads {kv_heads} does not divide heads {heads}")
