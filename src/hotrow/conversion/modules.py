"""Replace the classes of a model's modules, so that their methods run under a mode."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from hotrow.conversion import sampling
from hotrow.conversion.calls import Conversion, renew_record
from hotrow.conversion.classes import conversion_of, converted_class, original_class
from hotrow.conversion.outputs import watch_parameters
from hotrow.errors import HotrowError

# The reason for each module that could not be converted.
refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
DIRECTIONS = ("lookup", "matmul")


def convert_modules(model: nn.Module, direction: str, min_entries: int | None = None) -> None:
    """Replace the classes of the model's modules, so that their methods run under a mode.

    Products of one-hots with fewer than `min_entries` entries don't become lookups. If
    `min_entries` is None, a module that is already converted keeps its `min_entries`. Torch's own
    layers keep their class, because they don't create one-hots. The exception is a Sequential
    that contains your own modules, because it passes one-hots from one module to the next. A module
    whose class cannot be subclassed keeps its class, and `refusals` says why.

    Raises:
        HotrowError: the direction is "matmul", and a module's class cannot be subclassed.
    """
    watch_parameters()
    changes = []
    refused: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        earlier = conversion_of(module)
        is_kept = (
            earlier is not None
            and earlier.direction == direction
            and min_entries in (None, earlier.min_entries)
        )
        if is_kept:
            continue
        if _is_torch_layer(module) and not (direction == "matmul" and module is model):
            continue
        threshold = sampling.MIN_ENTRIES if min_entries is None else min_entries
        conversion = Conversion(original_class(module), direction, threshold)
        try:
            changes.append((module, conversion, converted_class(conversion)))
        except TypeError as error:
            name = conversion.original.__name__
            refused.append((module, f"{name} cannot be subclassed: {error}"))
    if refused and direction == "matmul":
        raise HotrowError(refused[0][1], fix="convert the modules inside it")
    for module, why in refused:
        refusals[module] = why
    for module, conversion, cls in changes:
        object.__setattr__(module, "__class__", cls)  # the module may refuse to set attributes
        renew_record(module, conversion)


def _is_torch_layer(module: nn.Module) -> bool:
    if not original_class(module).__module__.startswith("torch.nn."):
        return False
    return not isinstance(module, nn.Sequential) or all(map(_is_torch_layer, module))
