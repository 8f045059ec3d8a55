"""Save the keys of a vocabulary in a safetensors file, and read and validate such a file.

Strings are stored as two arrays: their concatenated UTF-8 bytes, and the position at which each
string ends. The options are JSON in the file's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.inputs.files import write_bytes
from hotrow.inputs.regular_file import open_regular, path_of_descriptor, reader_errors

METADATA_KEY = "hotrow.vocabulary"
VERSION = 1
_OPTIONS = {"unknown": str, "unknown_rows": int, "admit_after": int, "batch_count": int}
_LIMIT = 2**62  # for counts; leaves them room to grow
_KEY_NAMES = "keys", "pending_keys"


def write_keys(path: str | Path, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Write the arrays (or lists of strings) and the options to a file."""
    from safetensors.numpy import save  # deferred to keep `import hotrow.vocabulary` fast

    tensors: dict[str, NDArray[Any]] = {}
    for name, value in arrays.items():
        if isinstance(value, list):
            encoded = [key.encode("utf-8", "surrogatepass") for key in value]
            tensors[f"{name}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
            tensors[f"{name}.ends"] = np.cumsum([len(key) for key in encoded], dtype=np.int64)
        else:
            tensors[name] = np.ascontiguousarray(value)
    text = json.dumps({"version": VERSION, **options})
    write_bytes(path, save(tensors, metadata={METADATA_KEY: text}))


def read_keys(path: str | Path) -> tuple[type[str] | type[int], dict[str, Any], dict[str, Any]]:
    """Return the key type, the arrays and the options in a file that `write_keys` wrote.

    Raises:
        HotrowError: the file can't be read, or is damaged.
    """
    from safetensors import safe_open

    with (
        reader_errors(
            f"{path} is not a vocabulary, or is damaged", "save one with Vocabulary.save"
        ),
        open_regular(path, "the vocabulary") as descriptor,
        safe_open(path_of_descriptor(descriptor, path), framework="np") as file,
    ):
        options = json.loads((file.metadata() or {})[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        key_type: type[str] | type[int] = str if "keys.bytes" in tensors else int
        arrays: dict[str, Any] = {
            name: _decode(tensors, name) if key_type is str else _integers(tensors[name], 1)
            for name in _KEY_NAMES
        }
        arrays["seen"] = _integers(tensors["seen"], 2)
        arrays["pending_counts"] = _integers(tensors["pending_counts"], 1)
        _check(arrays, options)
        return key_type, arrays, options


def _integers(values: NDArray[Any], dimensions: int) -> NDArray[np.int64]:
    if values.dtype != np.int64 or values.ndim != dimensions:
        raise ValueError(f"an array is {values.ndim}-D {values.dtype}")
    return values


def _decode(tensors: dict[str, NDArray[Any]], name: str) -> list[str]:
    """Return the strings."""
    raw, ends = tensors[f"{name}.bytes"], _integers(tensors[f"{name}.ends"], 1)
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    if (
        raw.dtype != np.uint8
        or raw.ndim != 1
        or starts[-1] != len(raw)
        or (np.diff(starts) < 0).any()
    ):
        raise ValueError(f"the string positions of {name} are invalid")
    data = raw.tobytes()
    return [
        data[start:end].decode("utf-8", "surrogatepass")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=False)
    ]


def _check(arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ValueError unless the contents are consistent."""
    if options.get("version") != VERSION:
        raise ValueError(f"its version is {options.get('version')!r}, not {VERSION}")
    for name, kind in _OPTIONS.items():
        value: Any = options[name]
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < _LIMIT):
            raise ValueError(f"{name} is {value!r}")
    keys, pending = (_as_list(arrays[name]) for name in _KEY_NAMES)
    if len(set(keys)) < len(keys) or len({*keys, *pending}) < len(keys) + len(pending):
        raise ValueError("a key is repeated")
    if len(pending) != len(arrays["pending_counts"]):
        raise ValueError("pending_counts and pending_keys have different lengths")
    if arrays["seen"].shape != (2, options["unknown_rows"] + len(keys)):
        raise ValueError(f"seen has shape {arrays['seen'].shape} for {len(keys)} keys")
    for name in ("seen", "pending_counts"):
        if ((arrays[name] < 0) | (arrays[name] >= _LIMIT)).any():
            raise ValueError(f"{name} has values outside of 0..2**62 - 1")
    if (arrays["seen"][1] > options["batch_count"]).any():
        raise ValueError("a key was last seen after the last batch")


def _as_list(keys: Any) -> list[Any]:
    return list(keys.tolist()) if isinstance(keys, np.ndarray) else list(keys)
