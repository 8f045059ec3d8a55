"""Run plain and converted copies of a model, and collect the results of each run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.inputs.text import one_line
from hotrow.kernels import devices
from hotrow.table.gradient import RowGradient
from hotrow.table.metadata import METADATA_FUNCTIONS
from hotrow.table.nested import find_instances
from hotrow.table.parameter import Table
from hotrow.verify.check import signed_integers
from hotrow.verify.models.inputs import Inputs
from hotrow.verify.models.results import (
    collect_results,
    collect_state,
    find_changes,
    named_tensors,
)
from hotrow.verify.models.splice import ProductSplice

_LARGEST = 8  # the largest integer in the outputs' gradients


def _clone_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors. Several names may have the same tensor, which is copied once."""
    distinct = {id(each): each for each in tensors.values()}
    copies = {key: each.detach().clone() for key, each in distinct.items()}
    return {name: copies[id(each)] for name, each in tensors.items()}


@dataclass(frozen=True)
class Trial:
    """A model, its inputs, and the seed of its runs."""

    model: nn.Module
    name: str
    inputs: Inputs
    seed: int
    to: str = "lookup"
    device: str | None = None  # where the copies run; None for the model's own device

    @property
    def state(self) -> dict[str, Tensor]:
        """All that a run can change, by name, with the values before any run."""
        state = collect_state(self.model, self.inputs.by_name)
        return {name: value.detach().to(self.device) for name, value in state.items()}

    def copy_inputs(self) -> Inputs:
        """Return a copy of the inputs on the device of the copies of the model."""
        return self.inputs.copy(lambda tensor: tensor.to(self.device, copy=True))

    def make_plain(self) -> ModelCopy:
        """Copy the model."""
        try:
            model = deepcopy(self.model)
            model = model if self.device is None else model.to(self.device)
        except Exception as error:
            raise HotrowError(
                f"{self.name} cannot be copied, but the comparison needs copies: {one_line(error)}",
                fix="remove tensors with an autograd graph and anything else that deepcopy rejects",
            ) from error
        return ModelCopy(model, self)

    def make_converted(self, tables: tuple[tuple[str, bool], ...] = ()) -> ModelCopy:
        """Copy and convert the model, and store some parameters as tables.

        Args:
            tables: (name, columns) for each parameter to store as a table; see `Table.adopt`.
        """
        side = self.make_plain()
        convert(side.model, self.to, min_entries=0)
        for name, columns in tables:
            parameter = side.model.get_parameter(name)
            if not isinstance(parameter, Table):
                Table.adopt(parameter, columns)
        return side


class CopyCheck(TorchFunctionMode):
    """Raises an error if a copy of the model uses a parameter or buffer of the model itself.

    Parts that copies share, because their class says so, are allowed.
    """

    def __init__(self, trial: Trial, copied: ModelCopy) -> None:
        super().__init__()
        self._model_name = trial.name
        self._names = {id(tensor): name for name, tensor in named_tensors(trial.model)}
        for _, tensor in named_tensors(copied.model):
            self._names.pop(id(tensor), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in find_instances((args, kwargs), Tensor):
            if id(tensor) in self._names and func not in METADATA_FUNCTIONS:
                raise HotrowError(
                    f"a copy of {self._model_name} uses {self._names[id(tensor)]} of the model "
                    "itself, because deepcopy doesn't copy functions that contain the model",
                    fix="replace lambdas and nested functions of the model by methods",
                )
        return func(*args, **kwargs)


def find_lookup_weights(model: nn.Module) -> tuple[tuple[str, bool], ...]:
    """Return (name, columns) for each weight that `hotrow.optim` would store as a table."""
    return tuple(
        (name, parameter.lookup_axis == "columns")
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "lookup_axis") and not isinstance(parameter, Table)
    )


class ModelCopy:
    """A copy of the model, with methods to run it.

    Attributes:
        output_type: the name of the type that the model returned.
        not_compared: the type of each part of the output that can't be compared, by path.
        unnamed_count: the number of tensors whose gradients have no name.
        magnitudes: the largest finite magnitude in each result.
    """

    def __init__(self, model: nn.Module, trial: Trial) -> None:
        self.model, self.trial = model, trial
        self.output_type, self.magnitudes = "", dict[str, float]()
        self.not_compared: dict[str, str] = {}
        self.unnamed_count = 0
        self._cotangents: dict[tuple[int, torch.Size], Tensor] = {}
        self._given = trial.copy_inputs()
        self._changes_inputs = True
        self._differentiable = False

    def compute_results(self, mode: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
        """Run the model once with the trial's seed under `mode`; return all results by name.

        The results are the outputs, the gradients, and the state and inputs that the run changed.
        """
        inputs = self.trial.copy_inputs()
        state = collect_state(self.model, inputs.by_name)
        before = _clone_all(state)
        self._drop_gradients(inputs)
        with seeded(self.trial.seed), torch.enable_grad():
            with mode or nullcontext():
                outputs = self._run_forward(inputs)
            self.unnamed_count = len(_find_leaves(outputs.values()) - set(map(id, state.values())))
            found = _clone_all(outputs)
            # Keep the splice active, so that recomputation in the backward pass gives the same
            # values as the forward pass.
            with mode if isinstance(mode, ProductSplice) else nullcontext():
                self._differentiate(outputs)
        if isinstance(mode, ProductSplice):
            mode.finish()
        after = collect_state(self.model, inputs.by_name)
        leaves = {name.removeprefix("parameter "): each for name, each in after.items()}
        leaves |= dict(inputs.tensors)
        found |= {
            f"gradient of {name}": _to_dense(each.grad)
            for name, each in leaves.items()
            if each.is_leaf and each.grad is not None
        }
        changed = find_changes(before, after)
        self._changes_inputs = any("input " in name for name in changed)
        found |= changed
        self.magnitudes = {name: _largest_magnitude(values) for name, values in found.items()}
        return found

    def can_run(self, gradient: bool) -> bool:
        """Return whether the model can run with gradients or, if not `gradient`, without them."""
        if gradient:
            return self._differentiable
        if not self._differentiable:
            return True
        try:
            self.run(False)
        except RuntimeError:  # forward itself computes gradients, for example to return forces
            return False
        return True

    def run(self, gradient: bool) -> Any:
        """Run the model once for a measurement."""
        given = self._given.copy() if self._changes_inputs else self._given
        with torch.set_grad_enabled(gradient):
            outputs = self._run_forward(given)
            if gradient:
                self._differentiate(outputs)
        return outputs

    def state_tensors(self) -> list[Tensor]:
        """Return the model's tensors that are not parameters."""
        attributes = [each for m in self.model.modules() for each in vars(m).values()]
        return [*self.model.buffers(), *(each for each in attributes if isinstance(each, Tensor))]

    def clear_gradients(self) -> None:
        """Clear the gradients of the model and the inputs."""
        self._drop_gradients(self._given)

    def _drop_gradients(self, inputs: Inputs) -> None:
        self.model.zero_grad(set_to_none=True)
        for _, tensor in inputs.tensors:
            tensor.grad = None

    def _run_forward(self, inputs: Inputs) -> dict[str, Tensor]:
        returned = self.model(*inputs.args, **inputs.kwargs)
        self.output_type = type(returned).__name__
        outputs, self.not_compared = collect_results(returned, "output")
        return outputs

    def _differentiate(self, outputs: dict[str, Tensor]) -> None:
        trained = [output for output in outputs.values() if output.requires_grad]
        self._differentiable = bool(trained)
        if len(trained) == 1 and trained[0].numel() == 1:
            torch.autograd.backward(trained, [torch.ones_like(trained[0])])  # it may be a loss
        elif trained:
            cotangents = [self._cotangent(*each) for each in enumerate(trained)]
            torch.autograd.backward(trained, cotangents)

    def _cotangent(self, index: int, output: Tensor) -> Tensor:
        """Return random positive and negative integers, which differ between the outputs."""
        key = index, output.shape
        if key not in self._cotangents:
            shape = (*output.shape, 2) if output.is_complex() else output.shape
            seed = (self.trial.seed + index) % 2**64
            cotangent = signed_integers(shape, shape, _LARGEST, seed)
            if output.is_complex():
                cotangent = torch.view_as_complex(cotangent.double())
            self._cotangents[key] = cotangent.to(output)
        return self._cotangents[key]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generators of torch, numpy and Python, and restore them at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices.all_accelerators()):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _find_leaves(outputs: Iterable[Tensor]) -> set[int]:
    """Return the `id()` of each tensor that collects a gradient from the outputs."""
    nodes, seen, leaves = [each.grad_fn for each in outputs], set[Any](), set[int]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [each for each, _ in node.next_functions]
    return leaves


def _to_dense(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense tensor; add up the rows of repeated ids in batch order."""
    if isinstance(gradient, RowGradient):
        return gradient.as_dense()
    if not gradient.is_sparse:
        return gradient.detach().clone()
    if gradient.sparse_dim() != 1:
        return gradient.to_dense()
    values = gradient._values()
    return values.new_zeros(gradient.shape).index_add_(0, gradient._indices()[0], values)


def _largest_magnitude(values: Tensor) -> float:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.element_size() == 1:
        values = values.float()  # torch has no isfinite for float8
    finite = values[values.isfinite()].double().abs()
    return float(finite.max()) if len(finite) else 0.0
