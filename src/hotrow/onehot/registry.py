"""The registry of rules, which run torch functions on a one-hot without materializing it.

`RuleTensor` is the base class of tensors whose operations go through this registry; `OneHot` is its
only subclass. A rule returns the result that torch gives for the dense tensor, or NotImplemented.
If there is no rule, or the rule returns NotImplemented, the tensor is materialized and torch runs
on the dense tensor. The rules are in `rules/`. This module must not import `OneHot`, because that
would be a circular import.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.tracing import is_compiling, is_in_function, is_tracing, never_compile_alone
from hotrow.table.metadata import METADATA_FUNCTIONS
from hotrow.table.nested import find_instances, map_instances
from hotrow.table.overrides import find_override

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
USE_TORCH = object()  # rules return this for one-hots so small that torch is just as fast

# Functions that don't read the tensor's values.
_METADATA_FUNCTIONS = METADATA_FUNCTIONS | {torch.is_floating_point, torch.is_complex, torch.numel}

# Functions that torch.compile calls to describe the inputs and outputs of a graph.
_COMPILER_FUNCTIONS = {
    *(Tensor._is_view, Tensor._is_zerotensor, Tensor.is_conj, Tensor.is_neg, Tensor.is_inference),
    *(Tensor.untyped_storage, Tensor.is_coalesced),
}


class RuleTensor(Tensor):
    """A tensor whose operations use the rules in `RULES`.

    Attributes:
        is_grad_leaf: whether the caller set requires_grad on this tensor.
        origins: the lines of code that created the tensor, for the report.
        sizes: the tensor's shape.
    """

    is_grad_leaf: bool
    sizes: tuple[int, ...]
    origins: frozenset[Any]
    _dense: Tensor | None

    @property
    def entries(self) -> int:
        """The number of entries of the dense tensor."""
        raise NotImplementedError

    @property
    def has_many_zeros(self) -> bool:
        """True if this tensor is not a vector, and has more entries than ids."""
        raise NotImplementedError

    @property
    def is_plain(self) -> bool:
        """True if the class axis is the last axis and all entries that no id selects are 0."""
        raise NotImplementedError

    @property
    def is_modified(self) -> bool:
        """True if an in-place write changed the tensor, so it may no longer be a one-hot."""
        raise NotImplementedError

    @property
    def needs_grad(self) -> bool:
        """True if this tensor, or any of its weights or dense columns, requires grad."""
        raise NotImplementedError

    @property
    def is_leaf_or_view_of_leaf(self) -> bool:
        """True if torch raises an error for any in-place change to this tensor."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """True if this tensor itself is part of autograd's graph."""
        raise NotImplementedError

    @property
    def has_leaf_view(self) -> bool:
        """True if the caller set requires_grad on a view of this tensor."""
        raise NotImplementedError

    @property
    def affects_other_gradients(self) -> bool:
        """True if a write to this tensor changes the gradient of a view or a retained gradient."""
        raise NotImplementedError

    def record_use(self) -> None:
        """Record that `autograd.Function` or a transform may have used this tensor itself."""
        raise NotImplementedError

    def connect_all(self) -> None:
        """Connect this tensor, its base and their views after a write; see `OneHot.connect`."""
        raise NotImplementedError

    def materialize(self, permanent: bool = False) -> Tensor:
        """Return the dense tensor that this tensor represents."""
        raise NotImplementedError

    def wrap_view(self, view: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a view of the dense tensor as a view of this tensor."""
        raise NotImplementedError

    def replace_memory(self, replace: Callable[[Tensor], Any]) -> None:
        """Give the dense tensor other memory."""
        raise NotImplementedError

    def column(self) -> Tensor | None:
        """Return the values of a column that shares no memory with its one-hot, otherwise None."""
        raise NotImplementedError

    def materialize_for_write(self) -> Tensor:
        """Return the dense tensor for an in-place operation."""
        raise NotImplementedError

    @classmethod
    @never_compile_alone
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule for `func`, or torch's function if there is no rule."""
        if len(types) > 1 and find_override(types) is not None:
            return run_dense(func, args, kwargs or {})
        return apply(func, args, kwargs or {})

    @classmethod
    @never_compile_alone
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation that torch's own code calls below autograd."""
        return dispatch(func, args, kwargs or {})


def apply(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on arguments that contain one-hots."""
    if func in _COMPILER_FUNCTIONS and is_compiling():
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_tracing():
        # Rules depend on the ids, so the recording contains torch's operation instead.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not (is_compiling() or torch.is_grad_enabled()):
        # The caller may be the forward pass of an `autograd.Function`, whose gradient may flow to x
        # even if it reads only `x.detach()` or `x.shape`.
        for x in find_instances((args, kwargs), RuleTensor):
            x.record_use()
    rule = RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func in _METADATA_FUNCTIONS and not _is_modified(args[0]):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return run_dense(func, args, kwargs)


def run_dense(func: Any, args: Any, kwargs: Any, too_small: bool = False) -> Any:
    """Run torch's function on the materialized tensors.

    An in-place operation returns the one-hot itself. Each one-hot's origins record why it was
    materialized. If `too_small` is true, the one-hot was too small for a rule to be faster than
    torch. Otherwise, no rule applied.
    """
    written = _written(func, args, kwargs)
    if torch.is_grad_enabled() and any(
        x.is_leaf_or_view_of_leaf or x.has_leaf_view for x in written
    ):
        raise RuntimeError(
            f"{func.__name__} cannot change a one-hot in place if the one-hot or a view of it "
            "requires grad; call it under torch.no_grad(), or on x.clone()"
        )
    if is_in_function() and any(x.affects_other_gradients for x in written):
        raise RuntimeError(
            f"{func.__name__} cannot change a one-hot in place in an autograd.Function if the "
            "one-hot is a view, has views or retains its gradient; call the function on x.clone()"
        )
    tensors = list(find_instances((args, kwargs), RuleTensor))
    record_fallback(func, tensors, too_small)
    dense: list[tuple[Tensor, RuleTensor]] = []

    def convert(x: RuleTensor) -> Tensor:
        is_written = any(x is each for each in written)
        tensor = x.materialize_for_write() if is_written else x.materialize()
        dense.append((tensor, x))
        return tensor

    # In a transform, tensors have no memory.
    may_share = not (written or torch._C._are_functorch_transforms_active())
    columns = [column for x in tensors if may_share and (column := x.column()) is not None]
    if columns:
        remaining = iter(columns)
        arguments = map_instances(
            (args, kwargs),
            RuleTensor,
            lambda x: x.materialize() if x.column() is None else next(remaining),
        )
        result = func(*arguments[0], **arguments[1])
        if not _shares_memory(result, columns):
            return result
    arguments = map_instances((args, kwargs), RuleTensor, convert)
    result = func(*arguments[0], **arguments[1])
    for x in written:
        x.connect_all()
    for tensor, x in dense if written else ():
        with torch._C.DisableTorchFunctionSubclass():  # reads the shape without a rule
            shape = tuple(x.shape)
        if tensor.shape != shape:
            raise HotrowError(
                f"{func.__name__} cannot change the shape of a one-hot from {shape} to "
                f"{tuple(tensor.shape)}",
                fix="leave out the argument `out`, or use another operation than an in-place one",
            )
    for tensor, x in dense:
        if result is tensor:
            return x
    first = result[0] if isinstance(result, tuple | list) and result else result
    # Lists of numbers can be long. In a transform, the result has no memory.
    if not isinstance(first, Tensor) or torch._C._are_functorch_transforms_active():
        return result
    for tensor, x in dense:
        if _shares_memory(result, [tensor]):  # torch's version counter misses `view.data.zero_()`
            x.materialize(permanent=True)
            if torch.is_grad_enabled() and isinstance(result, Tensor) and result._is_view():
                return x.wrap_view(result, functools.partial(_run_on, func, args, kwargs, x))
    return result


def record_fallback(func: Any, tensors: list[Any], too_small: bool = False) -> None:
    """Record for the report that `func` used these one-hots as dense tensors."""
    have_zeros: dict[Any, bool] = {}  # for each origin, whether it created a tensor of many zeros
    for x in tensors:
        for origin in x.origins:
            origin.record_dense(x.entries)
            have_zeros[origin] = x.has_many_zeros or have_zeros.get(origin, False)
    for origin, has_many_zeros in have_zeros.items():
        origin.record_fallback(func, too_small, has_many_zeros)


def _run_on(func: Any, args: Any, kwargs: Any, x: RuleTensor, tensor: Tensor) -> Any:
    """Run `func` on the materialized tensors, with `tensor` in place of x."""
    arguments = map_instances(
        (args, kwargs), RuleTensor, lambda each: tensor if each is x else each.materialize()
    )
    return func(*arguments[0], **arguments[1])


def _shares_memory(result: Any, tensors: list[Tensor]) -> bool:
    """Return whether writing to the result would change one of the tensors."""
    with torch._C.DisableTorchFunctionSubclass():  # a table would settle its rows
        storages = {t.untyped_storage()._cdata for t in tensors}
        return any(
            t.layout != torch.strided or t.untyped_storage()._cdata in storages
            for t in find_instances(result, Tensor)
            if not isinstance(t, RuleTensor)
        )


def _written(func: Any, args: Any, kwargs: Any) -> list[RuleTensor]:
    """Return the one-hots that `func` changes."""
    if isinstance(func, torch._ops.OpOverload):
        return _written_by_schema(func, args, kwargs)
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE_OPERATORS or kwargs.get("inplace") is True
    if name.endswith("_") and not name.endswith("__"):
        in_place = name not in _HARMLESS
    changed = (args[:1] or tuple(kwargs.values())) if in_place else ()
    return list(find_instances((changed, kwargs.get("out")), RuleTensor))


def _written_by_schema(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[RuleTensor]:
    return _shared_by_schema(func, args, kwargs, only_written=True)


def _shared_by_schema(
    func: torch._ops.OpOverload, args: Any, kwargs: Any, only_written: bool = False
) -> list[RuleTensor]:
    """Return the one-hots that `func` changes or returns a view of."""
    shared = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write >= only_written
    ]
    return list(find_instances(shared, RuleTensor))


_IN_PLACE_OPERATORS = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}
_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "rename_"}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` below autograd; raise an error if a gradient would be lost."""
    replaces_memory = func.overloadpacket is torch.ops.aten.set_
    if replaces_memory:  # torch doesn't call __torch_function__ for set_
        for x in find_instances(args[1:], RuleTensor):
            x.materialize(permanent=True)
    tensors = list(find_instances((args, kwargs), RuleTensor))
    hidden = [x for x in tensors if x.needs_grad and not x.is_connected]
    for x in tensors:
        x.record_use()
    written = _written_by_schema(func, args, kwargs)
    hidden += [x for x in written if x.needs_grad]
    if torch.is_grad_enabled() and hidden:
        raise RuntimeError(
            f"{func} runs below autograd on a one-hot that requires grad, so its gradient would be "
            "lost; make the one-hot dense first: x = x.to_dense()"
        )
    if replaces_memory and written:
        values, options = _materialized(args[1:]), _materialized(kwargs)
        written[0].replace_memory(lambda t: func(t, *values, **options))
        return written[0]
    for x in _shared_by_schema(func, args, kwargs):  # `x.data` has another version counter
        x.materialize(permanent=True)
    return func(*_materialized(args), **_materialized(kwargs))


def materialize(x: Tensor, permanent: bool = False) -> Tensor:
    """Return the dense tensor that x represents.

    A compiled graph may call this with a dense tensor: if the graph also contains a table, torch
    runs it without rules, so for example `x.detach()` is dense.
    """
    return x.materialize(permanent) if isinstance(x, RuleTensor) else x


def _materialized(value: Any) -> Any:
    return map_instances(value, RuleTensor, materialize)


def _is_modified(x: Any) -> bool:
    if not isinstance(x, RuleTensor) or is_compiling() or x.is_grad_leaf:
        return False
    return x.is_modified


def rule(*functions: Any, any_layout: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for these functions. It receives the called function and its arguments.

    The rule runs only on plain one-hots, unless `any_layout` is true.
    """

    def register(body: Rule) -> Rule:
        parameters = inspect.signature(body).parameters
        kinds = [each.kind for each in parameters.values()]
        any_name = inspect.Parameter.VAR_KEYWORD in kinds
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            max_count = sys.maxsize
        else:
            max_count = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1  # without `func`
        for func in functions:

            def run(*args: Any, func: Any = func, **kwargs: Any) -> Any:
                positional, named = args, kwargs
                if kwargs and not args:  # the caller passed the tensor by keyword
                    named = dict(kwargs)
                    names = ("self", "input", "tensors")
                    positional = tuple(named.pop(name) for name in names if name in named)
                out = named.get("out")
                if "out" in named and (out is None or _can_copy_into(out, (args, kwargs))):
                    named = {name: value for name, value in named.items() if name != "out"}
                if (
                    "out" in named
                    or named.get("inplace") is True
                    or not (
                        0 < len(positional) <= max_count
                        and (any_name or named.keys() <= parameters.keys())
                        and (any_layout or _are_plain(positional))
                    )
                ):
                    return run_dense(func, args, kwargs)
                result = body(func, *positional, **named)
                if result is NotImplemented or result is USE_TORCH:
                    return run_dense(func, args, kwargs, too_small=result is USE_TORCH)
                if out is None:
                    return _without_base(result, (args, kwargs))
                if type(result) is not Tensor or (result.shape, result.dtype) != (
                    out.shape,
                    out.dtype,
                ):
                    return run_dense(func, args, kwargs)
                return out.copy_(result)

            RULES[func] = run
        return body

    return register


def _without_base(result: Any, arguments: Any) -> Any:
    """Return the result of a rule; if it is a view of a new tensor, return a tensor that is not.

    Torch's operations compute such a result directly, and torch treats writes to views, `detach_`
    and hooks differently.
    """
    if type(result) is not Tensor or is_compiling() or not result._is_view():
        return result
    if torch._C._are_functorch_transforms_active():
        return result  # the arguments may have no memory
    tensors = [
        each._dense if isinstance(each, RuleTensor) else each
        for each in find_instances(arguments, Tensor)
    ]
    if _shares_memory(tensors, [result]):
        return result
    separate: Tensor = _unsafe_view(result, result.shape)
    return separate if separate.stride() == result.stride() else result.clone()


_unsafe_view = torch.ops.aten._unsafe_view.default


def _can_copy_into(out: Any, arguments: Any) -> bool:
    """Return whether the result of a rule may be copied into the `out` argument."""
    if type(out) is not Tensor or is_compiling():
        return False
    # Torch raises an error if a gradient would be lost.
    tensors = find_instances(arguments, Tensor)
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))


def _are_plain(arguments: Any) -> bool:
    return all(x.is_plain for x in find_instances(arguments, RuleTensor))


def overloads(*names: str) -> list[Any]:
    """Return the torch function and the `Tensor` method for each name, if they exist."""
    namespaces = torch, Tensor
    return [getattr(space, name) for name in names for space in namespaces if hasattr(space, name)]


def graph_functions() -> list[Callable[..., Any]]:
    """Return the functions that `torch.compile` adds to a graph as single calls."""
    return [materialize, *RULES.values()]
