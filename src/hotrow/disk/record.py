"""`run.json`, the record that lists the files of a save.

The record contains its own checksum, and describes all other files. It lists the shape and dtype of
each tensor, the name of the save, and the length and checksum of `rest.pt`. The header of each
tensor's files also contains the name of the save.
"""

from __future__ import annotations

import json
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow.disk.folder import Folder, damaged_file
from hotrow.disk.layout import DTYPE_NAMES, DTYPES, FORMAT, MAX_BYTES, PAGE, Layout
from hotrow.disk.rest import MAX_REST_BYTES
from hotrow.errors import HotrowError

RECORD_FILE = "run.json"
MAX_RECORD_BYTES = 1 << 26  # three times the size of a record with 65,536 steps
TABLE, STEPS = "weight", "last"  # the tensors with the rows and with each row's last step

_SAVE_NAME = re.compile("[0-9a-f]{32}")
_TENSOR_NAME = re.compile("[a-z][a-z0-9_]{0,63}")


def new_name() -> str:
    """Return a unique name for a save."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Record:
    """The record of a save.

    Attributes:
        save: the name of the save.
        previous: the name of the previous save.
        session: the name in the headers of files that were created after the previous save.
        previous_rows: the number of rows in the previous save. The files have this many rows until
            the journal has been applied.
        tensors: the layout of each tensor.
        rest: the length and the CRC-32 of `rest.pt`.
        run: the training run, or None if the table has not been trained.
        behind: whether any rows of the table have missed steps.
    """

    save: str
    previous: str
    session: str
    previous_rows: int
    tensors: Mapping[str, Layout]
    rest: tuple[int, int]
    run: dict[str, Any] | None = None
    behind: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.tensors[TABLE].shape[0]

    def files(self) -> dict[str, list[Layout]]:
        """Return the layout of each file in this save and in the previous save, by file name."""
        return {
            file.file_name: [file, old]
            for layout in self.tensors.values()
            for file, old in zip(
                layout.files, layout.with_rows(self.previous_rows).files, strict=True
            )
        }

    def serialize(self) -> bytes:
        """Return the contents of `run.json`."""
        record = {
            "format": FORMAT,
            "page": PAGE,
            "save": self.save,
            "previous": self.previous,
            "session": self.session,
            "previous_rows": self.previous_rows,
            "tensors": {
                name: [DTYPE_NAMES[layout.dtype], layout.shape]
                for name, layout in self.tensors.items()
            },
            "rest": self.rest,
            "run": self.run,
            "behind": self.behind,
        }
        return json.dumps({**record, "checksum": _checksum(record)}).encode()


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def read_record(folder: Folder) -> Record:
    """Return the record of the last save.

    Raises:
        HotrowError: the record is missing or damaged, or another version of hotrow wrote it.
    """
    path = folder.path / RECORD_FILE
    try:
        with folder.open(RECORD_FILE, "rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        raise damaged_file(
            path, "it is missing; hotrow 0.2 did not write it before the first save"
        ) from None
    return parse_record(data, path)


def parse_record(data: bytes, path: Path) -> Record:
    """Parse the contents of a record.

    Arguments:
        data: the contents of `run.json`.
        path: the file that contains the data, for error messages.
    """
    try:
        record = _decode(data)
        _check_format(record, path)
        return _validate(record)
    except HotrowError:
        raise
    except (ValueError, RecursionError) as error:  # a RecursionError: it is deeply nested
        raise damaged_file(path, str(error)) from None


def parse_saved_record(data: bytes) -> Record:
    """Parse the result of `Record.serialize`, to check that `parse_record` could read it.

    Raises:
        ValueError: `parse_record` could not read it.
    """
    return _validate(_decode(data))


def _decode(data: bytes) -> dict[str, Any]:
    """Return the JSON object in the data, or raise a ValueError."""
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"it has more than {MAX_RECORD_BYTES:,} bytes")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("it does not contain a record")
    return record


def _validate(record: dict[str, Any]) -> Record:
    """Check the checksum and the values of a record, or raise a ValueError."""
    if record.pop("checksum", None) != _checksum(record):
        raise ValueError("its checksum does not match its contents")
    try:
        return _parse(record)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"invalid {error}") from None


def _check_format(record: dict[str, Any], path: Path) -> None:
    """Raise an error if hotrow 0.2, a newer version or another system wrote the folder."""
    if "format" not in record:
        raise HotrowError(
            f"{path} was written by hotrow 0.2 or is damaged: this version of hotrow requires "
            f"{FORMAT!r}, which has checksums",
            fix="convert the folder as described in docs/reference/data.md",
        )
    if record["format"] != FORMAT:
        raise HotrowError(
            f"{path} has the format {record['format']!r:.40}, but this version of hotrow reads "
            f"only {FORMAT!r}",
            fix="open the folder with the version of hotrow that wrote it",
        )
    if record.get("page") != PAGE:
        raise HotrowError(
            f"{path} was written on a system with memory pages of {record.get('page')!r:.40} "
            f"bytes, but pages on this system have {PAGE} bytes",
            fix="read its rows with hotrow.Embedding.from_file, and create a new folder",
        )


def _parse(record: dict[str, Any]) -> Record:
    """Validate a record. Its checksum matches, but an attacker can compute a valid checksum."""
    names = save, previous, session = record["save"], record["previous"], record["session"]
    if not all(isinstance(name, str) and _SAVE_NAME.fullmatch(name) for name in names):
        raise ValueError("name of a save")
    rest = record["rest"]
    if not (_are_counts(rest, 2) and rest[0] <= MAX_REST_BYTES):
        raise ValueError("length or checksum of rest.pt")
    run, behind = record["run"], record["behind"]
    if not isinstance(run, dict | None) or not isinstance(behind, bool):
        raise ValueError("training run")
    tensors = _parse_tensors(record["tensors"])
    rows = record["previous_rows"]
    if type(rows) is not int or not 1 <= rows * tensors[TABLE].row_bytes <= MAX_BYTES:
        raise ValueError("number of rows of the previous save")
    return Record(save, previous, session, rows, tensors, (rest[0], rest[1]), run, behind)


def _parse_tensors(tensors: Any) -> dict[str, Layout]:
    layouts = {}
    for name, (dtype, shape) in dict(tensors).items():
        if not (_TENSOR_NAME.fullmatch(name) and isinstance(dtype, str) and dtype in DTYPES):
            raise ValueError("name or dtype of a tensor")
        if not (_are_counts(shape, min(len(shape), 2)) and 0 not in shape):
            raise ValueError(f"shape of {name}")
        layouts[name] = Layout(name, tuple(shape), DTYPES[dtype])
        if layouts[name].value_bytes > MAX_BYTES:
            raise ValueError(f"shape of {name}")
    table = layouts[TABLE]
    if len(table.shape) != 2 or not table.dtype.is_floating_point:
        raise ValueError(f"shape or dtype of {TABLE}")
    steps = Layout(STEPS, table.shape[:1], DTYPES["I32"])
    for name, layout in layouts.items():
        if layout not in (steps, Layout(name, table.shape, table.dtype)):
            raise ValueError(f"shape or dtype of {name}")
    return layouts


def _are_counts(values: Any, length: int) -> bool:
    """Return whether `values` is a list of this many non-negative integers of 63 bits."""
    return (
        isinstance(values, list)
        and len(values) == length
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )
