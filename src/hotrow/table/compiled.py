"""The lookup as an operator that `torch.compile` can trace without a graph break.

The rows that a lookup must settle are known only at run time, so the operator is opaque to the
compiler. Another operator, `look_up_gradient`, computes the gradient. The compiler assumes that
this operator returns a dense (V, D) tensor. At run time, it returns a `RowGradient` instead, which
the compiled code passes on to autograd. If the compiled code needs the gradient's values (for
example, to add the gradients of two lookups), Inductor calls `dense_gradient`.

torch caches compiled code on disk, with only the name of the operator in the key. So rename
`look_up_rows` if its gradient changes its operator or its strides.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.ids import normalize_padding
from hotrow.kernels.tracing import is_compiling, is_exporting
from hotrow.table.autograd import LookUpOptions, row_gradient
from hotrow.table.gradient import RULES
from hotrow.table.parameter import Table, find_table
from hotrow.table.reading import row_reader

_OPTIONS = "int? padding, bool scale, bool columns"
_LOOK_UP = f"(Tensor table, Tensor ids, {_OPTIONS}) -> Tensor"
_GRADIENT = f"(Tensor gradient, Tensor ids, SymInt[] shape, {_OPTIONS}) -> Tensor"
_SUM = "(Tensor first, Tensor second) -> Tensor"
_operators = torch.ops.hotrow


def can_trace(table: Table, max_norm: float | None) -> bool:
    """Return whether `torch.compile` is tracing a lookup that the operator supports."""
    return is_compiling() and not is_exporting() and max_norm is None and not table.spans_processes


def traced_look_up(
    table: Table, ids: Tensor, padding_idx: int | None, scale_grad_by_freq: bool
) -> Tensor:
    """Return rows of a table, (*ids.shape, D), in code that `torch.compile` traces."""
    with torch._C.DisableTorchFunctionSubclass():
        output: Tensor = _operators.look_up_rows(
            table, ids, padding_idx, scale_grad_by_freq, table.columns
        )
        return output


def _look_up(table: Tensor, ids: Tensor, padding: int | None, scale: bool, columns: bool) -> Tensor:
    """Check the ids, and read settled rows; the other arguments affect only the gradient."""
    owner = find_table(table)
    if owner is None:
        return torch.nn.functional.embedding(ids, table.t() if columns else table)
    # Autograd is off in compiled code, so it is unknown here whether the rows get a gradient.
    with torch._C.DisableTorchFunctionSubclass():
        read, _ = row_reader(owner, ids, None, 2.0, is_trained=True)
        return read()


def _fake_look_up(
    table: Tensor, ids: Tensor, padding: int | None, scale: bool, columns: bool
) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[0 if columns else 1])


def _row_gradient(
    gradient: Tensor,
    ids: Tensor,
    shape: Sequence[int],
    padding: int | None,
    scale: bool,
    columns: bool,
) -> Tensor:
    """Return a `RowGradient`; copy the rows and the ids, because compiled code reuses memory."""
    ids = ids.reshape(-1).to(torch.int64, copy=True)
    excluded = normalize_padding(padding, shape[1 if columns else 0])
    return row_gradient(ids, gradient.clone(), LookUpOptions(shape, excluded, scale, columns))


def _dense_gradient(*args: Any) -> Tensor:
    gradient: Tensor = _row_gradient(*args).as_dense()  # type: ignore[attr-defined]
    return gradient


def _fake_gradient(
    gradient: Tensor,
    ids: Tensor,
    shape: Sequence[int],
    padding: int | None,
    scale: bool,
    columns: bool,
) -> Tensor:
    _register_lowering()
    return gradient.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, ids, *ctx.options = inputs
    ctx.save_for_backward(ids)
    ctx.shape = table.shape


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    result = _operators.look_up_gradient(gradient, ids, ctx.shape, *ctx.options)
    return result, None, None, None, None


def _add_gradients(first: Tensor, second: Tensor) -> Tensor:
    return first + second


def _fake_sum(first: Tensor, second: Tensor) -> Tensor:
    return torch.empty_like(first)


def _register_lowering() -> None:
    """Tell Inductor which operators return a `RowGradient`."""
    if "torch._inductor.lowering" in sys.modules:  # if not, another compiler is running
        _register_lowering_once()


@functools.cache
def _register_lowering_once() -> None:
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.pattern_matcher import Arg, CallFunction, register_graph_pattern
    from torch._inductor.virtualized import V

    row, sum_ = _operators.look_up_gradient.default, _operators.add_gradients.default
    dense = {
        row: _operators.dense_gradient.default,
        sum_: _operators.add_dense_gradients.default,
    }

    def lower(operator: Any, *args: Any) -> Any:
        """Call the dense operator unless the result is only returned or added."""
        users = V.graph.current_node.users
        if any(user.op != "output" and user.target is not sum_ for user in users):
            operator = dense[operator]
        fallback = fallback_handler(operator, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
        return fallback(*args)

    for operator in dense:
        register_lowering(operator, type_promotion_kind=None)(functools.partial(lower, operator))

    def add_rows(match: Any, *args: Any) -> None:
        """Use `add_gradients` for each addition of row gradients, even in longer sums."""
        for node in match.graph.nodes:
            if node.target is add and all(getattr(x, "target", None) in dense for x in node.args):
                node.target, node.kwargs = sum_, {}

    add = torch.ops.aten.add.Tensor
    gradients = (CallFunction(row, *(Arg() for _ in row._schema.arguments)) for _ in range(2))
    pattern = CallFunction(add, *gradients)
    register_graph_pattern(pattern, pass_dict=pass_patterns[0])(add_rows)


for _name, _schema, _function, _fake in (
    ("look_up_rows", _LOOK_UP, _look_up, _fake_look_up),
    ("look_up_gradient", _GRADIENT, _row_gradient, _fake_gradient),
    ("dense_gradient", _GRADIENT, _dense_gradient, _fake_gradient),
    ("add_gradients", _SUM, _add_gradients, _fake_sum),
    ("add_dense_gradients", _SUM, _add_gradients, _fake_sum),
):
    torch.library.define(f"hotrow::{_name}", _schema)
    torch.library.impl(f"hotrow::{_name}", "CompositeExplicitAutograd", _function)
    torch.library.register_fake(f"hotrow::{_name}", _fake)
torch.library.register_autograd("hotrow::look_up_rows", _backward, setup_context=_save)

# A rule receives the `RowGradient` itself. Without a rule, the operator would get a dense tensor.
RULES[_operators.add_gradients.default] = lambda func, args, kwargs: args[0] + args[1]
RULES[_operators.add_dense_gradients.default] = lambda func, args, kwargs: (
    args[0] + args[1]
).as_dense()
