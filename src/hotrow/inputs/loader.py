"""Load a model from a module:callable name, and its inputs from such a name or from a file.

A callable is imported and called. A .pt or .safetensors file may contain only tensors: other
objects are never unpickled.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hotrow.errors import HotrowError
from hotrow.inputs.checkpoint import load_checkpoint
from hotrow.inputs.files import open_safetensors
from hotrow.inputs.regular_file import open_regular
from hotrow.inputs.sparse_file import check_not_sparse
from hotrow.inputs.text import escape_unprintable, one_line

_WHAT = "the inputs"
_SUFFIXES = ".pt", ".safetensors"
_NAME_FIX = "write it as package.module:function"


def is_import_name(text: str) -> bool:
    """Return whether the text has the form module:callable.

    >>> is_import_name("models:build"), is_import_name("inputs.pt")
    (True, False)
    """
    return ":" in text


def load_model(name: str, seed: int = 0) -> nn.Module:
    """Import a model, or import a callable and call it to create the model.

    Args:
        name: module:callable; both parts may be dotted.
        seed: torch's random seed, set before the import and again before the call.

    Raises:
        HotrowError: the name can't be found, imported or called, or the result isn't a module.
    """
    found = _import_attribute(name, seed)
    model = found if isinstance(found, nn.Module) else _call(name, found, seed)
    if not isinstance(model, nn.Module):
        raise HotrowError(
            f"{name} returns an object of type {type(model).__name__}, but must return a "
            "torch.nn.Module",
            fix="return the model itself",
        )
    return model


def load_inputs(name: str, seed: int = 0) -> Any:
    """Load inputs as a tensor, a tuple or list of arguments, or a dict of keyword arguments.

    Args:
        name: module:callable, or a file. The tensors in a .safetensors file become keyword
            arguments, or positional arguments if they are named 0, 1, 2, ...
        seed: torch's random seed, as in `load_model`.

    Raises:
        HotrowError: the name can't be found, imported or called; the file can't be read or contains
            objects other than tensors; or the inputs have the wrong type.
    """
    suffix = Path(name).suffix.lower()
    if suffix in _SUFFIXES:
        inputs = _read_pt(name) if suffix == ".pt" else _read_safetensors(name)
    elif is_import_name(name):
        inputs = _call(name, _import_attribute(name, seed), seed)
    else:
        raise HotrowError(
            f"--inputs {name!r} is neither module:function nor a {' or '.join(_SUFFIXES)} file",
            fix="pass the name of a function that returns the inputs, or save them with torch.save",
        )
    if not isinstance(inputs, torch.Tensor | tuple | list | Mapping):
        raise HotrowError(
            f"the inputs from {name} are of type {type(inputs).__name__}, but must be a tensor, a "
            "tuple or list of positional arguments, or a dict of keyword arguments",
            fix="return or save one of these types",
        )
    return inputs


def _import_attribute(name: str, seed: int) -> Any:
    """Import module:attribute; like `python -m`, search the current directory first."""
    path, _, attribute = name.partition(":")
    if not (_is_dotted_name(path) and _is_dotted_name(attribute)) or path.endswith(".py"):
        python = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        good = _is_dotted_name(python) and _is_dotted_name(attribute)
        raise HotrowError(
            f"{name!r} does not have the form module:function",
            fix=f"write it as {python}:{attribute}" if good else _NAME_FIX,
        )
    directory = os.getcwd()
    is_on_path = directory in sys.path or "" in sys.path
    if not is_on_path and _is_in_folder(path.partition(".")[0], directory):
        sys.path.insert(0, directory)
    importlib.invalidate_caches()
    torch.manual_seed(seed)
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path == missing or path.startswith(f"{missing}."):
            raise HotrowError(
                f"module {missing}, which {name} needs, is neither in {directory} nor installed",
                fix="run the command from the module's folder, or install the module",
            ) from None
        raise _failure(f"{path} cannot be imported", error) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _failure(f"{path} cannot be imported", error) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            is_property = inspect.getattr_static(found, part, None) is not None
            if isinstance(error, AttributeError) and not is_property:
                raise _missing_attribute(name, found, part) from None
            raise _failure(f"{name} cannot be read", error) from error
    return found


def _is_in_folder(module: str, directory: str) -> bool:
    """Return whether the import of a top-level module would find it in a directory.

    Otherwise, the directory must not be searched: files in it, which can be from a stranger, could
    replace the libraries that torch imports later.
    """
    found = None if module in sys.modules else PathFinder.find_spec(module, [directory])
    if found is None or found.origin is not None:
        return found is not None
    installed = find_spec(module)  # comes before a folder without modules
    return installed is None or installed.origin is None


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _missing_attribute(name: str, owner: Any, part: str) -> HotrowError:
    guess, where = "", f"an object of type {type(owner).__name__}"
    if isinstance(owner, ModuleType | type):
        names = [key for key, value in vars(owner).items() if key[:1] != "_" and callable(value)]
        matches = difflib.get_close_matches(part, names, n=1)
        guess = f" (did you mean {matches[0]}?)" if matches else ""
        file = vars(owner).get("__file__")
        where = f"{owner.__name__}{f' ({file})' if file else ''}"
    return HotrowError(f"{name}: there is no {part} in {where}{guess}", fix="check the name")


def _call(name: str, function: Any, seed: int) -> Any:
    if not callable(function):
        raise HotrowError(
            f"{name} is of type {type(function).__name__}, which can't be called",
            fix="pass the name of a function without required arguments",
        )
    torch.manual_seed(seed)
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: its code would become hotrow's exit code
        raise _failure(f"{name}() fails", error) from error


def _failure(what: str, error: BaseException) -> HotrowError:
    return HotrowError(
        f"{what}: {one_line(error)}", fix="run the code in Python to see the full traceback"
    )


def _read_pt(path: str) -> Any:
    with (
        open_regular(path, _WHAT) as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        check_not_sparse(descriptor, path)
        return load_checkpoint(file, path, device="cpu")


def _read_safetensors(path: str) -> Any:
    with open_safetensors(path, _WHAT, "save the tensors") as (file, descriptor):
        check_not_sparse(descriptor, path)
        tensors: dict[str, torch.Tensor] = {
            name: file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
        }
    numbered = [name for name in tensors if name.isdecimal()]
    if not numbered:
        return tensors
    places = [str(place) for place in range(len(tensors))]
    if set(tensors) != set(places):
        names = ", ".join(map(escape_unprintable, sorted(tensors)[:9]))
        raise HotrowError(
            f"the tensors in {path} are named {names}, but these are neither all keywords nor the "
            "numbers from 0",
            fix="name all tensors after the model's arguments, or number them all 0, 1, 2, ...",
        )
    return tuple(tensors[place] for place in places)
