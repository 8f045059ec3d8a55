"""Save the contents of a vocabulary as a dict, and check contents before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.vocabulary.unknown_keys import COUNT_LIMIT

VERSION = 1
_OPTIONS = {"unknown": str, "unknown_rows": int, "admit_after": int, "batch_count": int}
KEYS = "keys", "pending_keys"  # lists of strings, or int64 arrays
_DIMENSIONS = {"pending_counts": 1, "seen": 2}

# The arrays (or lists of strings) and the options.
Contents = tuple[dict[str, Any], dict[str, Any]]


def to_state(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents as one dict, with tensors instead of arrays."""
    tensors = {
        name: value if isinstance(value, list) else torch.from_numpy(value)
        for name, value in arrays.items()
    }
    return {"version": VERSION, **options, **tensors}


def from_state(state: Mapping[str, Any]) -> Contents:
    """Return the contents of a dict that `to_state` returned.

    Raises:
        HotrowError: the dict is not such a dict, or is damaged.
    """
    try:
        options = {name: state[name] for name in ("version", *_OPTIONS)}
        arrays = {
            name: value.cpu().numpy() if isinstance(value := state[name], Tensor) else value
            for name in (*KEYS, *_DIMENSIONS)
        }
        check_options(options)
        is_text = isinstance(arrays["keys"], list)
        for name in KEYS:
            if not is_text:
                check_integers(arrays[name], 1)
            elif not (isinstance(arrays[name], list) and set(map(type, arrays[name])) <= {str}):
                raise ValueError(f"{name} is not a list of strings")
        check_arrays(arrays, options)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise HotrowError(
            f"the dict is not the state of a vocabulary, or is damaged "
            f"({type(error).__name__}: {error})",
            fix="pass the result of Vocabulary.state_dict()",
        ) from None
    return arrays, options


def check_integers(values: Any, dimensions: int) -> NDArray[np.int64]:
    """Return the array; raise ValueError unless it is int64 with this number of dimensions."""
    if not isinstance(values, np.ndarray):
        raise ValueError(f"an array is a {type(values).__name__}")
    if values.dtype != np.int64 or values.ndim != dimensions:
        raise ValueError(f"an array is {values.ndim}-D {values.dtype}")
    return values


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the options have the right types."""
    if options.get("version") != VERSION:
        raise ValueError(f"its version is {options.get('version')!r:.60}, not {VERSION}")
    for name, kind in _OPTIONS.items():
        value: Any = options[name]
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < COUNT_LIMIT):
            raise ValueError(f"{name} is {value!r:.60}")


def check_shapes(shapes: Mapping[str, tuple[int, ...]], unknown_rows: int) -> None:
    """Raise ValueError unless the arrays and lists have the right sizes for the number of keys."""
    (key_count,) = shapes["keys"]
    if shapes["pending_keys"] != shapes["pending_counts"]:
        raise ValueError("pending_counts and pending_keys have different lengths")
    if shapes["seen"] != (2, unknown_rows + key_count):
        raise ValueError(f"seen has shape {shapes['seen']} for {key_count} keys")


def check_arrays(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the arrays are consistent with each other and with the options."""
    for name, dimensions in _DIMENSIONS.items():
        check_integers(arrays[name], dimensions)
    shapes = {
        name: (len(value),) if isinstance(value, list) else value.shape
        for name, value in arrays.items()
    }
    check_shapes(shapes, options["unknown_rows"])
    keys, pending = (
        value if isinstance(value := arrays[name], list) else value.tolist() for name in KEYS
    )
    if len(set(keys)) < len(keys) or len({*keys, *pending}) < len(keys) + len(pending):
        raise ValueError("a key is repeated")
    for name in _DIMENSIONS:
        if ((arrays[name] < 0) | (arrays[name] >= COUNT_LIMIT)).any():
            raise ValueError(f"{name} has values outside of 0..2**62 - 1")
    if (arrays["seen"][1] > options["batch_count"]).any():
        raise ValueError("a key was last seen after the last batch")
