"""Refuse tables from `hotrow.disk` folders whose rows are or may be stale."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hotrow.errors import HotrowError
from hotrow.inputs.regular_file import read_regular, reader_errors

_SMALLEST_PAGE = 4096
_MAX_RUN_BYTES = 1 << 26  # hotrow.disk's limit for run.json


def check_settled(path: Path, file: Any, descriptor: int) -> None:
    """Raise `HotrowError` if some rows of a file from a `hotrow.disk` folder are or may be stale.

    Args:
        path: the path of the safetensors file.
        file: its reader.
        descriptor: its descriptor.
    """
    metadata = file.metadata() or {}
    is_unmarked = not metadata and len(file.keys()) == 1 and _header_fills_pages(descriptor)
    if not (is_unmarked or metadata.get("format", "").startswith("hotrow.disk")):
        return  # a run.json or journal next to it belongs to another program
    folder = path.resolve().parent  # a link to the table may be in another folder
    run = folder / "run.json"
    record = _read_record(run) if os.path.lexists(run) else None
    if (record and record.get("behind")) or os.path.lexists(folder / "journal"):
        raise HotrowError(
            f"{path} is in a hotrow.disk folder, and some rows of its table are not up to date",
            fix="open the folder with hotrow.disk.open, then call store.table.settle() and "
            "store.save()",
        )
    if record is None or record.get("save") != metadata.get("save"):  # 0.2 did not name saves
        raise HotrowError(
            f"{path} is from a hotrow.disk folder, but the record of its save ({run.name}) is not "
            "next to it, so some of its rows may not be up to date",
            fix="copy the whole folder, or export the table: open the folder with "
            "hotrow.disk.open, and write store.layer.state_dict() with safetensors.torch.save_file",
        )


def _header_fills_pages(descriptor: int) -> bool:
    """Return whether the header takes whole pages, as in hotrow 0.2, which left files unmarked."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    length = 8 + int.from_bytes(os.read(descriptor, 8), "little")
    return length % _SMALLEST_PAGE == 0


def _read_record(run: Path) -> dict[str, Any]:
    fix = "restore the file from a backup; if it isn't from hotrow.disk, move the table elsewhere"
    with reader_errors(f"{run}, a file next to the table, is damaged", fix):
        record = json.loads(read_regular(run, "a file next to the table", _MAX_RUN_BYTES))
    if not isinstance(record, dict):
        raise HotrowError(
            f"{run}, a file next to the table, does not contain a training run", fix=fix
        )
    return record
