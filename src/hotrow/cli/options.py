"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TableFile = Annotated[
    str | None, typer.Option(help="Read the table from this safetensors file.", metavar="FILE")
]
TensorName = Annotated[
    str | None,
    typer.Option(
        help="Name of the tensor; optional if the file has only one table.", metavar="NAME"
    ),
]
TokenizerFile = Annotated[
    str | None,
    typer.Option(help="The tokenizer.json file that turns text into ids.", metavar="FILE"),
]
