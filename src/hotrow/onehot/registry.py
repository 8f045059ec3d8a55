"""The table of rules: what each torch function does with a one-hot without materializing it.

`RuleTensor` is the base of a tensor whose operations go through this table; `OneHot` is the one
such class. A rule gives what torch gives for the materialized tensor, or NotImplemented; then, and
where there is no rule, the tensor is materialized and torch runs on it. The rules themselves are in
`rules/`, which imports the tensor; nothing here does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.table.metadata import METADATA_FUNCTIONS
from hotrow.table.nested import find_instances, map_instances

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
USE_TORCH = object()  # what a rule returns for a product so small that torch's own is as fast

# These read no value either.
_METADATA_FUNCTIONS = METADATA_FUNCTIONS | {torch.is_floating_point, torch.is_complex, torch.numel}


class RuleTensor(Tensor):
    """A tensor whose operations are looked up in `RULES`.

    Attributes:
        is_grad_leaf: whether its own gradient was asked for.
        origins: the lines of code that made it, for a report.
    """

    is_grad_leaf: bool
    origins: frozenset[Any]
    _dense: Tensor | None

    @property
    def entries(self) -> int:
        """The number of entries of the dense tensor."""
        raise NotImplementedError

    @property
    def is_modified(self) -> bool:
        """Whether something was written into it, so that it may no longer be a one-hot."""
        raise NotImplementedError

    @property
    def needs_grad(self) -> bool:
        """Whether its gradient, or that of what scales it, is wanted."""
        raise NotImplementedError

    def materialize(self, permanent: bool = False) -> Tensor:
        """The dense tensor that this stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of the rule of `func`, or torch's."""
        return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd: what torch's own code does with the tensor."""
        return dispatch(func, args, kwargs or {})


def apply(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of `func`, whose arguments contain one-hots."""
    rule = RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func in _METADATA_FUNCTIONS and not _is_modified(args[0]):  # of a leaf, in any case
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return run_dense(func, args, kwargs)


def run_dense(func: Any, args: Any, kwargs: Any, too_small: bool = False) -> Any:
    """Torch's result for the materialized tensors; a one-hot written in place is returned itself.

    `too_small`: the one-hots are materialized because the product is small, and not for want of a
    rule; their origins record which of the two it was.
    """
    if is_compiling():
        return func(*_materialized(args), **_materialized(kwargs))
    tensors = list(find_instances((args, kwargs), RuleTensor))
    for x in tensors:
        for origin in x.origins:
            if too_small:
                origin.record_small_product(x.entries)
            else:
                origin.record_fallback(func)
    result = func(*_materialized(args), **_materialized(kwargs))
    return next((x for x in tensors if x._dense is result), result)


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` below autograd, where a gradient of the weights could not be kept."""
    if func.overloadpacket is torch.ops.aten.set_:  # torch calls no torch function before
        for x in find_instances(args, RuleTensor):
            x.materialize(permanent=True)
    hidden = [
        x for x in find_instances((args, kwargs), RuleTensor) if x.needs_grad and not x.is_grad_leaf
    ]
    if torch.is_grad_enabled() and hidden:
        raise RuntimeError(
            f"{func} met a one-hot whose gradient is wanted where autograd does not see it; write "
            "it out before, as by x + 0"
        )
    return func(*_materialized(args), **_materialized(kwargs))


def materialize(x: RuleTensor) -> Tensor:
    """The dense tensor that x stands for."""
    return x.materialize()


def _materialized(value: Any) -> Any:
    return map_instances(value, RuleTensor, materialize)


def _is_modified(x: Any) -> bool:
    if not isinstance(x, RuleTensor) or is_compiling() or x.is_grad_leaf:
        return False
    return x.is_modified


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the rule of these functions; it is called with the function and its arguments."""

    def register(body: Rule) -> Rule:
        parameters = inspect.signature(body).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        for func in functions:

            def run(*args: Any, func: Any = func, **kwargs: Any) -> Any:
                positional, named = args, kwargs
                if kwargs and not args:  # the tensor itself by its name
                    named = dict(kwargs)
                    names = ("self", "input", "tensors")
                    positional = tuple(named.pop(name) for name in names if name in named)
                accepted = any_name or named.keys() <= parameters.keys()
                if "out" in named or not (positional and accepted):
                    return run_dense(func, args, kwargs)
                result = body(func, *positional, **named)
                if result is NotImplemented or result is USE_TORCH:
                    return run_dense(func, args, kwargs, too_small=result is USE_TORCH)
                return result

            RULES[func] = run
        return body

    return register


def overloads(*names: str) -> list[Any]:
    """The torch function and the tensor method of each name, where they exist."""
    namespaces = torch, Tensor
    return [getattr(space, name) for name in names for space in namespaces if hasattr(space, name)]


def graph_functions() -> list[Callable[..., Any]]:
    """What `torch.compile` puts into a graph as it is, and traces later, with everything else."""
    return [materialize, *RULES.values()]
