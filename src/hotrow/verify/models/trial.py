"""A model and its inputs, to be run plain and converted: copies, seeds, outputs, gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.inputs.text import told
from hotrow.onehot.tensor import OneHot
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.verify.models.splice import Splice, compared

_LARGEST = 8  # of the outputs' gradients


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Inputs:
        """From a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
        if isinstance(inputs, Mapping):
            odd = next((key for key in inputs if not isinstance(key, str)), None)
            if odd is not None:
                raise HotrowError(
                    f"the inputs are a dict with the key {odd!r}, but keyword arguments have names",
                    fix="give a tuple for positional arguments; ({...},) for one that is a dict",
                )
            return cls((), dict(inputs))
        return cls(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})

    def fresh(self) -> Inputs:
        """A copy, of the tensors too."""
        return Inputs(_copied(self.args), _copied(self.kwargs))

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor in it, by name."""
        found = [(f"input {i}", each) for i, each in enumerate(self.args)]
        found += [(f"input {name}", each) for name, each in self.kwargs.items()]
        return [leaf for name, each in found for leaf in leaves(each, name) if _is_given(each)]

    @property
    def described(self) -> str:
        """The dtypes and shapes."""
        texts = []
        for name, tensor in self.tensors:
            kind = str(tensor.dtype).removeprefix("torch.")
            name = name.removeprefix("input ")
            texts.append(f"{'' if name.isdecimal() else f'{name} '}{kind} {tuple(tensor.shape)}")
        return ", ".join(texts) or "no tensors"


def _is_given(value: Any) -> bool:
    return not isinstance(value, bool | int | float | complex)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        several = [_copied(each) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return copy.deepcopy(value)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value, numbers as tensors, each with its place."""
    if isinstance(value, OneHot):
        value = value.write_out()
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, bool | int | float | complex):
        yield name, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{name}.{field.name}")


@dataclass(frozen=True)
class Trial:
    """A model, and what it is to be run on."""

    original: nn.Module
    name: str
    given: Inputs
    seed: int
    to: str = "lookup"

    def plain(self) -> Side:
        """A copy as it is."""
        try:
            return Side(copy.deepcopy(self.original), self)
        except Exception as error:
            raise HotrowError(
                f"{self.name} cannot be copied, and both ways need a copy each: {told(error)}",
                fix="keep no tensor with a history in it, nor anything that copy.deepcopy refuses",
            ) from error

    def converted(self, tables: tuple[tuple[str, bool], ...] = ()) -> Side:
        """A converted copy, with these parameters as tables, by columns or not."""
        side = self.plain()
        convert(side.model, self.to, least=0)
        for name, columns in tables:
            parameter = side.model.get_parameter(name)
            if not isinstance(parameter, Table):
                Table.adopt(parameter, columns)
        return side


def looked_up_in(model: nn.Module) -> tuple[tuple[str, bool], ...]:
    """Parameters that a first step of `hotrow.optim` would make tables, and whether by columns."""
    return tuple(
        (name, parameter.looked_up == "columns")
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "looked_up") and not isinstance(parameter, Table)
    )


class Side:
    """One copy of the model, and its runs.

    Attributes:
        returned: the type of what it returned, in words.
        scales: the largest finite size in each result.
    """

    def __init__(self, model: nn.Module, trial: Trial) -> None:
        self.model, self.trial = model, trial
        self.returned, self.scales = "", dict[str, float]()
        self._cotangents: dict[tuple[str, torch.Size], Tensor] = {}
        self._given = trial.given.fresh()
        self._mutates = True
        self._differentiable = False

    def results(self, mode: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
        """Outputs, gradients and buffers of one run from the seed, within a mode of torch's."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        inputs = self.trial.given.fresh()
        versions = [tensor._version for _, tensor in inputs.tensors]
        self._forget(inputs)
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self.trial.seed)
            with mode or nullcontext():
                outputs = self._outputs(inputs)
            found = {name: output.detach().clone() for name, output in outputs}
            # What is computed again in the backward pass is to be as it was.
            with mode if isinstance(mode, Splice) else nullcontext():
                self._differentiate(outputs)
        self._mutates = versions != [tensor._version for _, tensor in inputs.tensors]
        if isinstance(mode, Splice):
            mode.finish()
        leaves = [*self.model.named_parameters(), *inputs.tensors]
        found |= {f"gradient of {n}": _dense(p.grad) for n, p in leaves if p.grad is not None}
        for name, buffer in self.model.named_buffers():
            if name not in before or compared("", before[name], buffer).verdict != "bitwise":
                found[f"buffer {name}"] = buffer.detach().clone()
        self.scales = {name: _scale(values) for name, values in found.items()}
        return found

    def runs(self, gradient: bool) -> bool:
        """Whether it runs, with a gradient or without."""
        if gradient:
            return self._differentiable
        if not self._differentiable:
            return True
        try:
            self.work(False)
        except RuntimeError:  # a model that needs a graph inside, as forces do
            return False
        return True

    def work(self, gradient: bool) -> Any:
        """One run, to be measured."""
        given = self._given.fresh() if self._mutates else self._given
        with torch.set_grad_enabled(gradient):
            outputs = self._outputs(given)
            if gradient:
                self._differentiate(outputs)
        return outputs

    def state(self) -> list[Tensor]:
        """The tensors that the model holds beside its parameters."""
        held = [each for m in self.model.modules() for each in vars(m).values()]
        return [*self.model.buffers(), *(each for each in held if isinstance(each, Tensor))]

    def clear(self) -> None:
        """Let go of the gradients."""
        self._forget(self._given)

    def _forget(self, inputs: Inputs) -> None:
        self.model.zero_grad(set_to_none=True)
        for _, tensor in inputs.tensors:
            tensor.grad = None

    def _outputs(self, inputs: Inputs) -> list[tuple[str, Tensor]]:
        returned = self.model(*inputs.args, **inputs.kwargs)
        self.returned = type(returned).__name__
        return list(leaves(returned, "output"))

    def _differentiate(self, outputs: list[tuple[str, Tensor]]) -> None:
        trained = [(name, output) for name, output in outputs if output.requires_grad]
        self._differentiable = bool(trained)
        if trained:
            cotangents = [self._cotangent(name, output) for name, output in trained]
            torch.autograd.backward([output for _, output in trained], cotangents)

    def _cotangent(self, name: str, output: Tensor) -> Tensor:
        """Integers of either sign, none of them 0; 1 for a loss."""
        key = name, output.shape
        if output.numel() == 1:
            return torch.ones_like(output)
        if key not in self._cotangents:
            generator = torch.Generator().manual_seed(self.trial.seed)
            sizes = torch.randint(1, _LARGEST + 1, output.shape, generator=generator)
            signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
            self._cotangents[key] = (sizes * signs).to(output)
        return self._cotangents[key]


def _dense(gradient: Tensor) -> Tensor:
    """The gradient written out; repeated ids of a sparse one are added in batch order."""
    if isinstance(gradient, RowGradient):
        return gradient.dense()
    if not gradient.is_sparse:
        return gradient.detach().clone()
    if gradient.sparse_dim() != 1:
        return gradient.to_dense()
    values = gradient._values()
    return values.new_zeros(gradient.shape).index_add_(0, gradient._indices()[0], values)


def _scale(values: Tensor) -> float:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    finite = values[values.isfinite()].double().abs()
    return float(finite.max()) if len(finite) else 0.0
