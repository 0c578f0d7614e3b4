"""A small causal language model with random weights and a character tokenizer, written in the Hugging Face layout.

Knows: the Qwen2 architecture, which head sizes vLLM's CPU attention accepts, and how to make a tokenizer that gives
back every text over its alphabet exactly. Needs no network. Used by `offsetrl model new`, by the demo and by tests.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from schemas.errors import SettingError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
"""Special tokens: ids 0, 1 and 2. <unk> exists so that a character outside the alphabet is seen and refused."""

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention accepts."""


def create(
    folder: Path,
    *,
    alphabet: str,
    layers: int = 4,
    hidden: int = 96,
    heads: int = 3,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    max_positions: int = 256,
    tie: bool = True,
    seed: int = 0,
) -> None:
    """Write a model of about 0.3 M parameters (by default) into a new or empty folder.

    `kv_heads` defaults to `heads`, `intermediate` to twice `hidden`. The same arguments give the same weights. Raises
    SettingError, before anything is written, for a folder that is not empty and for sizes that no engine would load.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    intermediate = 2 * hidden if intermediate is None else intermediate
    _check_folder(folder)
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
        initializer_range=hidden**-0.5 / 2,  # the usual 0.02 leaves so narrow a model nearly uniform for many steps
        dtype="float32",
    )
    folder.mkdir(parents=True, exist_ok=True)
    _random_model(config, seed).save_pretrained(folder)  # writes generation_config.json from the same ids
    tokenizer.save_pretrained(folder)


def _random_model(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def _tokenizer(alphabet: str, max_positions: int) -> PreTrainedTokenizerFast:
    """One token per character, and back; ids follow the order of the alphabet after the special tokens."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # a plain dot would pass newlines over
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _check_folder(folder: Path) -> None:
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
