"""One rule for each operation on a one-hot, and writing it out where there is none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.compilation import is_compiling
from hotrow.onehot.gradient import link
from hotrow.onehot.parts import Part, flatten
from hotrow.onehot.tensor import OneHot
from hotrow.table.metadata import NO_VALUES
from hotrow.table.nested import mapped, within

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
SPARED = object()  # what a rule gives where torch's own is as quick

# These read no value either.
_NO_VALUES = NO_VALUES | {torch.is_floating_point, torch.is_complex, torch.numel}


def apply(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives, for arguments with one-hots among them."""
    rule = RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func in _NO_VALUES and not _is_changed(args[0]):  # of a leaf, in any case
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    return written_out(func, args, kwargs)


def written_out(func: Any, args: Any, kwargs: Any, spared: bool = False) -> Any:
    """What torch gives for the tensors written out; one that was written into is given back."""
    if is_compiling():
        return func(*_written(args), **_written(kwargs))
    found = list(within((args, kwargs), OneHot))
    for x in found:
        for origin in x.origins:
            origin.spared(x.entries) if spared else origin.left(func)
    result = func(*_written(args), **_written(kwargs))
    return next((x for x in found if x._written is result), result)


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Below autograd, where a gradient of the weights could not be kept."""
    if func.overloadpacket is torch.ops.aten.set_:  # torch asks nobody before
        for x in within(args, OneHot):
            x.write_out(for_good=True)
    hidden = [x for x in within((args, kwargs), OneHot) if needs_grad(x) and not x.leaf]
    if torch.is_grad_enabled() and hidden:
        raise RuntimeError(
            f"{func} met a one-hot whose gradient is wanted where autograd does not see it; write "
            "it out before, as by x + 0"
        )
    return func(*_written(args), **_written(kwargs))


def write_out(x: OneHot) -> Tensor:
    """The plain tensor that x stands for."""
    return x.write_out()


def _written(value: Any) -> Any:
    return mapped(value, OneHot, write_out)


def _is_changed(x: Any) -> bool:
    return isinstance(x, OneHot) and not (is_compiling() or x.leaf) and x.changed


def needs_grad(x: OneHot) -> bool:
    """Whether a gradient is wanted of it, or of what scales it."""
    if x.leaf:
        return True
    held = flatten(x._parts)[0] + ([] if x._shadow is None else [x._shadow])
    return any(each.requires_grad for each in held)


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """The rule of these functions; takes the function and its arguments."""

    def register(body: Rule) -> Rule:
        known = inspect.signature(body).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for func in functions:

            def run(*args: Any, func: Any = func, **kwargs: Any) -> Any:
                given, named = args, kwargs
                if kwargs and not args:  # the tensor itself by its name
                    named = dict(kwargs)
                    given = tuple(named.pop(n) for n in ("self", "input", "tensors") if n in named)
                if "out" in named or not (given and (any_name or named.keys() <= known.keys())):
                    return written_out(func, args, kwargs)
                result = body(func, *given, **named)
                if result is NotImplemented or result is SPARED:
                    return written_out(func, args, kwargs, spared=result is SPARED)
                return result

            RULES[func] = run
        return body

    return register


def methods(*names: str) -> list[Any]:
    """The function of torch and the method of tensors of each name, where there are both."""
    places = torch, Tensor
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


def meta(x: OneHot) -> Tensor:
    """Without values, for torch to say what becomes of the shape, or what is wrong."""
    return meta_of(x.sizes, x.strides, x.kind)


def meta_of(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    """Of these sizes and strides, without values; not to be written to."""
    if is_compiling():  # sizes may be symbols
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return _known_meta(sizes, strides, dtype)


@functools.lru_cache(256)
def _known_meta(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def derived(
    x: OneHot,
    parts: Sequence[Part],
    out: Tensor,
    change: Callable[[Tensor], Tensor],
    rounds: bool = False,
) -> OneHot:
    """Made of x by an operation that copies, which `change` is; of dtype and strides of `out`.

    Where it `rounds` otherwise than on the parts, writing out does what torch does.
    """
    shadow, recipe = None, None
    if x.leaf or x._shadow is not None:
        shadow = link(change, out, x.shadow)
    if rounds:
        before = x.frozen()
        recipe = lambda: change(before.write_out())  # noqa: E731
    return OneHot(parts, out.dtype, shadow, None, x.origins, out.stride(), recipe)


def along_batch(
    x: OneHot, out: Tensor, change: Callable[[Tensor], Tensor], view: Callable[[Tensor], Tensor]
) -> OneHot:
    """`change` of the ids, weights and columns; a view of x where torch's result is one."""
    return viewed(x, [part.map(change) for part in x.parts], out, change, view)


def viewed(
    x: OneHot,
    parts: Sequence[Part],
    out: Tensor,
    change: Callable[[Tensor], Tensor],
    view: Callable[[Tensor], Tensor],
) -> OneHot:
    """As `derived`; a view of x where `out` is one, and then taken of it by `view`."""
    made = derived(x, parts, out, change)
    if out._is_view():
        x.viewed, made._parent = True, (x, view)
    return made
