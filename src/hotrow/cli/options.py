"""Command-line options that several commands share."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

from hotrow.errors import HotrowError

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
Device = Annotated[
    str, typer.Option(help="Device: cpu, or cuda for an NVIDIA GPU.", metavar="DEVICE")
]


def check_device(device: str) -> None:
    """Raise HotrowError unless the device is cpu, or a GPU that torch can use."""
    match = re.fullmatch("cpu|cuda(?::([0-9]{1,3}))?", device)
    if match is None:
        raise HotrowError(f"--device {device!r:.60} is not supported", fix="use cpu or cuda")
    if device != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise HotrowError(
            f"--device {device}: torch finds {torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu, or install torch with CUDA on a computer with an NVIDIA GPU",
        )
