"""What a folder says of its run: the steps of the table, and what was saved beside it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from hotrow.errors import HotrowError

RUN, REST = "run.json", "rest.pt"

Run = dict[str, Any]


def read_run(folder: Path) -> Run:
    """The steps that rows may have missed; nothing, if the table has not been trained.

    Raises:
        HotrowError: the file is damaged.
    """
    path = folder / RUN
    try:
        found: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, "it holds no run")
    return found


def read_rest(folder: Path) -> Any:
    """What the last save kept beside the table, or None.

    Raises:
        HotrowError: the file is damaged.
    """
    path = folder / REST
    try:
        return torch.load(path, weights_only=True) if path.exists() else None
    except OSError:
        raise
    except Exception as error:  # of the archive, of pickle, of torch
        raise damaged(path, first_line(error)) from None


def packed(rest: Any) -> bytes:
    """As `torch.save` writes it, known to be read again.

    Raises:
        HotrowError: it could not be read.
    """
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise HotrowError(
            f"rest could not be read again ({first_line(error)})",
            fix="keep tensors, numbers, text, and lists, tuples and dicts of these",
        ) from None
    return buffer.getvalue()


def damaged(path: Path, why: str) -> HotrowError:
    """The error of a file that does not hold what was written."""
    return HotrowError(f"{path} is damaged ({why})", fix="take it from a backup")


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '':.100}"
