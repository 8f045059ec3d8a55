"""Load a model from a module:callable name, and its inputs from such a name or from a file.

A module:callable name is imported and called. A .pt or .safetensors file may contain only tensors:
other objects are never unpickled.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from hotrow.errors import HotrowError
from hotrow.inputs.files import open_safetensors
from hotrow.inputs.regular_file import open_regular, path_of_descriptor, reader_errors
from hotrow.inputs.text import escape_unprintable, one_line

_WHAT = "the inputs"
# The limits for the objects in a .pt file.
_MAX_OBJECTS = 1_000_000
_MAX_DEPTH = 50
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
    if not isinstance(inputs, torch.Tensor | tuple | list | dict):
        raise HotrowError(
            f"the inputs from {name} are of type {type(inputs).__name__}, but must be a tensor, a "
            "tuple or list of positional arguments, or a dict of keyword arguments",
            fix="return or save one of these types",
        )
    return inputs


def _import_attribute(name: str, seed: int) -> Any:
    """Import module:attribute; like `python -m`, also search the current directory."""
    path, _, attribute = name.partition(":")
    if not (_is_dotted_name(path) and _is_dotted_name(attribute)) or path.endswith(".py"):
        python = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        good = _is_dotted_name(python) and _is_dotted_name(attribute)
        raise HotrowError(
            f"{name!r} does not have the form module:function",
            fix=f"write it as {python}:{attribute}" if good else _NAME_FIX,
        )
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
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
    except (Exception, SystemExit) as error:
        raise _failure(f"{path} cannot be imported", error) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _missing_attribute(name, found, part)
        found = getattr(found, part)
    return found


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _missing_attribute(name: str, owner: Any, part: str) -> HotrowError:
    candidates = [key for key, value in vars(owner).items() if key[0] != "_" and callable(value)]
    matches = difflib.get_close_matches(part, candidates, n=1)
    guess = f" (did you mean {matches[0]}?)" if matches else ""
    file = getattr(owner, "__file__", None)
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
    except (Exception, SystemExit) as error:
        raise _failure(f"{name}() fails", error) from error


def _failure(what: str, error: BaseException) -> HotrowError:
    return HotrowError(
        f"{what}: {one_line(error)}", fix="run the code in Python to see the full traceback"
    )


def _read_pt(path: str) -> Any:
    with (
        open_regular(path, _WHAT) as descriptor,
        reader_errors(
            f"{path} cannot be read as a .pt file", "is the file complete? Write it with torch.save"
        ),
    ):
        zipped = _is_zip_of_stored_files(descriptor, path)
        try:
            # The tensors of a zip file are memory-mapped, so their claimed sizes use no memory.
            inputs = torch.load(
                path_of_descriptor(descriptor, path),
                map_location="cpu",
                weights_only=True,
                mmap=zipped,
            )
        except UnpicklingError as error:
            classes = re.search(r"GLOBAL (\S+)", str(error))
            content = escape_unprintable(classes[1]) if classes else ""
            what = f"contains a {content}" if content else "cannot be read as tensors"
            raise HotrowError(
                f"{path} {what}, but hotrow loads only tensors from pickle files",
                fix="save a tensor, or a tuple or dict of tensors, or pass the name of a function "
                "that returns them",
            ) from None
        _check_contents(inputs, path, os.fstat(descriptor).st_size)
        return inputs


def _is_zip_of_stored_files(descriptor: int, path: str) -> bool:
    """Return whether the file is a zip file, the format that torch has written since version 1.6.

    Raises `HotrowError` if a file in the zip file is compressed, because decompressing it could
    exhaust the memory. torch doesn't compress files.
    """
    with open(descriptor, "rb", closefd=False) as file:
        if not zipfile.is_zipfile(file):
            return False
        if any(each.compress_type != zipfile.ZIP_STORED for each in zipfile.ZipFile(file).filelist):
            raise HotrowError(f"{path} is a compressed zip file", fix="write it with torch.save")
        return True


def _check_contents(inputs: Any, path: str, size: int) -> None:
    """Raise `HotrowError` if a few bytes represent a huge tensor or a huge number of objects.

    A tensor can repeat its elements, and a list can contain another list many times.
    """
    objects = [(inputs, 0)]
    for count in itertools.count(1):
        if not objects:
            return
        each, depth = objects.pop()
        parts: Iterable[Any] = ()
        if isinstance(each, torch.Tensor):
            stored = size if each.layout == torch.strided and not each.is_meta else 0
            if each.numel() > max(stored, _MAX_OBJECTS):
                raise HotrowError(
                    f"{path} has a tensor of {each.numel():,} elements, but stores fewer",
                    fix="save the tensor with tensor.contiguous()",
                )
        elif isinstance(each, dict):
            parts = itertools.chain(each.keys(), each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            parts = each
        objects += ((part, depth + 1) for part in parts)
        if count + len(objects) > _MAX_OBJECTS or depth > _MAX_DEPTH:
            raise HotrowError(
                f"{path} has more than {_MAX_OBJECTS:,} objects, or objects nested more than "
                f"{_MAX_DEPTH} levels deep",
                fix="save fewer, larger tensors",
            )


def _read_safetensors(path: str) -> Any:
    with open_safetensors(path, _WHAT, "save the tensors") as file:
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
            f"the tensors in {path} are named {names}, which mixes positions and keywords",
            fix="name all tensors after the model's arguments, or number them all 0, 1, 2, ...",
        )
    return tuple(tensors[place] for place in places)
