"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TableFile = Annotated[
    str | None, typer.Option(help="A safetensors file with the table.", metavar="FILE")
]
TensorName = Annotated[
    str | None,
    typer.Option(
        help="Its name in the file; may be left out if only one qualifies.", metavar="NAME"
    ),
]
TokenizerFile = Annotated[
    str | None, typer.Option(help="A tokenizer.json, for the text.", metavar="FILE")
]
