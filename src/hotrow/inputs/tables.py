"""Check that a tensor is a table: 2-D, floating point and dense."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.errors import HotrowError

TABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_table(table: object, name: str) -> Tensor:
    """Return the table after checking that it is a dense 2-D tensor of a supported dtype."""
    if not isinstance(table, Tensor):
        raise HotrowError(
            f"{name} is of type {type(table).__name__}, but a table must be a tensor",
            fix="pass a torch.Tensor, for example the weight of a layer",
        )
    if table.ndim != 2:
        raise HotrowError(
            f"{name} has shape {tuple(table.shape)}, but a table must be 2-D (rows, columns)"
        )
    if table.dtype not in TABLE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TABLE_DTYPES)
        raise HotrowError(
            f"{name} is {str(table.dtype).removeprefix('torch.')}, but the dtype of a table must "
            f"be one of {names}",
            fix="convert it with .float()",
        )
    if table.layout != torch.strided or table.is_meta:
        raise HotrowError(
            f"{name} is a {str(table.layout).removeprefix('torch.')} tensor on {table.device}, "
            "but a table must be dense and have values"
        )
    return table
