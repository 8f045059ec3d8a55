"""Read and write the files of a training run: the table's ledger, and the user's `rest`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from hotrow.errors import HotrowError

RUN_FILE, REST_FILE = "run.json", "rest.pt"

Run = dict[str, Any]


def read_run(folder: Path) -> Run:
    """Return the saved run, or an empty dict if the table has not been trained.

    Raises:
        HotrowError: the file is damaged.
    """
    path = folder / RUN_FILE
    try:
        run: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise damaged_file(path, str(error)) from None
    if not isinstance(run, dict):
        raise damaged_file(path, "it does not contain a training run")
    return run


def read_rest(folder: Path) -> Any:
    """Return the `rest` of the last save, or None.

    Raises:
        HotrowError: the file is damaged.
    """
    path = folder / REST_FILE
    try:
        return torch.load(path, weights_only=True) if path.exists() else None
    except OSError:
        raise
    except Exception as error:  # raised by zipfile, pickle or torch
        raise damaged_file(path, error_summary(error)) from None


def serialize_rest(rest: Any) -> bytes:
    """Serialize `rest` with `torch.save`, and check that `torch.load` can read it.

    Raises:
        HotrowError: `torch.load(weights_only=True)` cannot read the result.
    """
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise HotrowError(
            "rest cannot be saved, because torch.load(weights_only=True) could not read it "
            f"({error_summary(error)})",
            fix="use only tensors, numbers, strings, and lists, tuples and dicts of these",
        ) from None
    return buffer.getvalue()


def damaged_file(path: Path, why: str) -> HotrowError:
    """Return the error for a damaged file."""
    return HotrowError(f"{path} is damaged ({why})", fix="restore it from a backup")


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '':.100}"
