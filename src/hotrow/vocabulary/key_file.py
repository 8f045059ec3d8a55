"""Save the keys of a vocabulary in a safetensors file, and read and validate such a file.

Strings are stored as two arrays: their concatenated UTF-8 bytes, and the position at which each
string ends. The options are JSON in the file's metadata, with a checksum of them and of the arrays.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.inputs.files import write_bytes
from hotrow.inputs.regular_file import open_regular, path_of_descriptor, reader_errors
from hotrow.inputs.sparse_file import check_not_sparse
from hotrow.vocabulary.key_state import (
    KEYS,
    VERSION,
    Contents,
    check_arrays,
    check_integers,
    check_options,
    check_shapes,
)

METADATA_KEY = "hotrow.vocabulary"
_COUNTS = "seen", "pending_counts"
_CHECKSUM = "checksum"


def write_keys(path: str | Path, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Write the arrays (or lists of strings) and the options to a file."""
    from safetensors.numpy import save  # deferred to keep `import hotrow.vocabulary` fast

    tensors, options = _encode(arrays), {"version": VERSION, **options}
    text = json.dumps({**options, _CHECKSUM: _checksum(tensors, options)})
    write_bytes(path, save(tensors, metadata={METADATA_KEY: text}))


def read_keys(path: str | Path) -> Contents:
    """Return the arrays and the options in a file that `write_keys` wrote.

    The sizes of the arrays are checked before the arrays are read. Other arrays are not read.

    Raises:
        HotrowError: the file can't be read, or is damaged.
    """
    from safetensors import safe_open

    with (
        reader_errors(
            f"{path} is not a vocabulary, or is damaged", "save one with Vocabulary.save"
        ),
        open_regular(path, "the vocabulary") as descriptor,
    ):
        check_not_sparse(descriptor, path)
        with safe_open(path_of_descriptor(descriptor, path), framework="np") as file:
            options = json.loads((file.metadata() or {})[METADATA_KEY])
            check_options(options)
            is_text = "keys.bytes" in file.keys()  # noqa: SIM118
            suffix = ".ends" if is_text else ""
            shapes = {name: _shape(file, f"{name}{suffix}") for name in KEYS}
            shapes |= {name: _shape(file, name) for name in _COUNTS}
            check_shapes(shapes, options["unknown_rows"])
            read = _read_text if is_text else _read_integers
            arrays = {name: read(file, name) for name in KEYS}
            arrays |= {name: file.get_tensor(name) for name in _COUNTS}
            check_arrays(arrays, options)
            expected = options.pop(_CHECKSUM)
            if expected != _checksum(_encode(arrays), options):
                raise ValueError("its checksum is wrong")
    return arrays, options


def _encode(arrays: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return arrays, with two arrays for each list of strings."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in arrays.items():
        if isinstance(value, list):
            encoded = [key.encode("utf-8", "surrogatepass") for key in value]
            tensors[f"{name}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
            tensors[f"{name}.ends"] = np.cumsum([len(key) for key in encoded], dtype=np.int64)
        else:
            tensors[name] = np.ascontiguousarray(value)
    return tensors


def _checksum(tensors: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the arrays and the options."""
    shapes = {name: array.shape for name, array in tensors.items()}
    result = zlib.crc32(json.dumps([shapes, options], sort_keys=True).encode())
    for name in sorted(tensors):
        result = zlib.crc32(tensors[name].data, result)
    return result


def _shape(file: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an array without reading it."""
    if name not in file.keys():  # noqa: SIM118
        raise ValueError(f"it has no array {name!r}")
    return tuple(file.get_slice(name).get_shape())


def _read_integers(file: Any, name: str) -> NDArray[np.int64]:
    return check_integers(file.get_tensor(name), 1)


def _read_text(file: Any, name: str) -> list[str]:
    """Read strings."""
    ends = _read_integers(file, f"{name}.ends")
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    is_valid = (
        _shape(file, f"{name}.bytes") == (int(starts[-1]),) and (starts[1:] >= starts[:-1]).all()
    )
    raw = file.get_tensor(f"{name}.bytes") if is_valid else None
    if raw is None or raw.dtype != np.uint8:
        raise ValueError(f"the string positions of {name} are invalid")
    data = raw.tobytes()
    return [
        data[start:end].decode("utf-8", "surrogatepass")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=False)
    ]
