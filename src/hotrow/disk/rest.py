"""`rest.pt`, the other data that a user saves together with a table."""

from __future__ import annotations

import io
import os
import zlib
from typing import Any

import torch

from hotrow.disk.folder import Folder, damaged_file
from hotrow.errors import HotrowError
from hotrow.inputs.checkpoint import load_checkpoint
from hotrow.inputs.sparse_file import check_not_sparse

REST_FILE = "rest.pt"
MAX_REST_BYTES = 1 << 35  # reading more could fill the memory


def serialize_rest(rest: Any) -> bytes:
    """Serialize `rest` with `torch.save`, and check that `read_rest` can read the result.

    Raises:
        HotrowError: `read_rest` cannot read the result.
    """
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        load_checkpoint(buffer, REST_FILE, device="cpu")
        if buffer.getbuffer().nbytes > MAX_REST_BYTES:
            raise ValueError(f"it has more than {MAX_REST_BYTES:,} bytes")
    except Exception as error:
        raise HotrowError(
            f"rest cannot be saved, because disk.open could not read it ({error_summary(error)})",
            fix="use only tensors, numbers, strings, and lists, tuples and dicts of these",
        ) from None
    return buffer.getvalue()


def describe_rest(data: bytes) -> tuple[int, int]:
    """Return the length and the CRC-32 of `rest.pt`."""
    return len(data), zlib.crc32(data)


def read_rest(folder: Folder, expected: tuple[int, int]) -> Any:
    """Return the contents of `rest.pt`.

    Arguments:
        folder: the folder of the file.
        expected: the length and the CRC-32 of the file.

    Raises:
        HotrowError: the file is missing or damaged.
    """
    path = folder.path / REST_FILE
    try:
        with folder.open(REST_FILE, "rb") as file:
            data = b""
            if os.fstat(file.fileno()).st_size == expected[0]:
                check_not_sparse(file.fileno(), path)
                data = file.read(expected[0])
    except FileNotFoundError:
        raise damaged_file(path, "it is missing") from None
    if describe_rest(data) != expected:
        raise damaged_file(path, "it does not belong to the last save, or has changed")
    # Another program could change the file meanwhile, so load the bytes that were checked.
    return load_checkpoint(io.BytesIO(data), path)


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '':.100}"
