"""The inputs of a model that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.inputs.text import one_line
from hotrow.verify.models.results import named_leaves, number_repeats

_MAX_VALUES, _MAX_REPEATED = 100_000, 10**9  # comparing them takes about 20 s


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Inputs:
        """Create `Inputs` from a tensor, a tuple or list, or a dict of keyword arguments."""
        try:
            _check_size(inputs)
        except RecursionError:
            raise HotrowError(
                "the inputs are nested too deeply",
                fix="pass tensors, or tuples, lists or dicts of tensors",
            ) from None
        if isinstance(inputs, Mapping):
            other_key = next((key for key in inputs if not isinstance(key, str)), None)
            if other_key is not None:
                raise HotrowError(
                    f"the inputs are a dict with the key {other_key!r}, but the keys must be "
                    "names of keyword arguments",
                    fix="pass positional arguments as a tuple; for a single dict, write ({...},)",
                )
            return cls((), dict(inputs))
        return cls(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})

    def copy(self, change: Callable[[Tensor], Tensor] = torch.clone) -> Inputs:
        """Return a deep copy in which `change` copies each tensor."""
        # deepcopy can't copy tensors that are not leaves of autograd's graph.
        tensors = {id(tensor): tensor for _, tensor in self.tensors}
        copies: dict[int, Any] = {key: _copy_tensor(each, change) for key, each in tensors.items()}
        try:
            for key, tensor in tensors.items():
                copied = vars(copies[key])  # some classes copy attributes, for example values
                missing = {
                    name: each
                    for name, each in vars(tensor).items()
                    if name not in copied or not isinstance(each, Tensor)
                }
                copied.update(deepcopy(missing, copies))
            return Inputs(deepcopy(self.args, copies), deepcopy(self.kwargs, copies))
        except Exception as error:
            raise HotrowError(
                f"the inputs cannot be copied, but the comparison needs copies: {one_line(error)}",
                fix="remove locks, generators and anything else that deepcopy rejects",
            ) from error

    @property
    def by_name(self) -> dict[str, Any]:
        """Every argument, with its name in the report."""
        named = [*enumerate(self.args), *self.kwargs.items()]
        return {f"input {key}": value for key, value in named}

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor in the arguments, with its name."""
        found = (
            (path, leaf)
            for name, value in self.by_name.items()
            for path, leaf in named_leaves(value, name)
            if isinstance(leaf, Tensor)
        )
        return list(number_repeats(found))

    @property
    def description(self) -> str:
        """The dtypes and shapes of the tensors."""
        texts = []
        for name, tensor in self.tensors:
            kind = str(tensor.dtype).removeprefix("torch.")
            name = name.removeprefix("input ")
            shape = "(nested)" if tensor.is_nested else tuple(tensor.shape)
            texts.append(f"{'' if name.isdecimal() else f'{name} '}{kind} {shape}")
        return ", ".join(texts) or "no tensors"


def _check_size(inputs: Any) -> None:
    """Raise an error if comparing the inputs would take very long.

    A small file can contain the same list or tensor many times.
    """
    seen, repeated = set(), 0
    for count, (_, leaf) in enumerate(named_leaves(inputs, "")):
        if id(leaf) in seen and isinstance(leaf, Tensor | str | bytes):
            repeated += leaf.numel() if isinstance(leaf, Tensor) else len(leaf)
        seen.add(id(leaf))
        if count == _MAX_VALUES:
            raise HotrowError(
                f"the inputs have more than {_MAX_VALUES:,} values in lists, dicts and objects",
                fix="pass lists of numbers as tensors",
            )
        if repeated > _MAX_REPEATED:
            raise HotrowError(
                f"the inputs repeat the same tensors and texts, with more than {_MAX_REPEATED:,} "
                "values in total",
                fix="pass each tensor once",
            )


def _copy_tensor(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    copied = change(tensor.detach())
    if type(tensor) is nn.Parameter:
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
