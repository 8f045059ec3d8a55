"""Versions of torch's elementwise optimizers that update only the touched rows of a table.

Each optimizer can train every parameter of a model: hotrow's step updates tables, and torch's own
step updates dense parameters. A table is a (V, D) parameter converted by `hotrow.convert`, which by
default skips parameters with fewer than 100,000 entries. A table's step updates only the touched
rows. In dense training, momentum or weight decay also changes rows that no id selected. The next
time such a row is read, hotrow first applies all the steps that it has missed. So every read
returns what torch's dense steps would have produced, up to rounding.

Options
    Options and defaults match torch's. `foreach` and `fused` affect only dense parameters. Tables
    don't support `capturable` or `differentiable`.

Gradients
    If a table's gradient comes from lookups (`nn.Embedding`, `nn.EmbeddingBag`), a step updates
    only the touched rows. If the gradient is dense, for example because of a tied output head,
    torch's own step updates all rows, and `hotrow.convert.report(model)` gives the reason.

Shapes and dtypes
    A table has shape (V, D), and so does each tensor of its state. On the CPU, kernels for float32,
    float64 and bfloat16 are compiled when they are first used on a machine. The Triton kernels for
    NVIDIA GPUs support these dtypes and float16, but have not been run on a GPU yet. Other dtypes
    and devices use plain torch.

State
    `state_dict()` uses torch's format. torch's optimizer of the same name can load hotrow's state,
    and hotrow can load torch's state. A run that resumes from a checkpoint produces exactly the
    same bits as the run that saved the checkpoint, except with NAdam and ASGD in bfloat16 or
    float16: as in torch, loading rounds their scalars. `state_dict()` and other reads apply missed
    steps early. This can change the last bits of the final table, but the error stays within the
    per-step bound.

Time
    A step's time is proportional to the number of ids and touched rows, and independent of V. With
    a closed form, this time is also independent of the number of missed steps. Coupled weight decay
    has no closed form (except in SGD and ASGD), so hotrow replays each row's missed steps one by
    one. For RMSprop with weight decay, hotrow runs torch's dense step.

Memory
    In addition to torch's state, a table needs 4 bytes per row and about 200 bytes per recorded
    step. At most 65,536 steps are recorded.

Errors
    An optimizer raises `HotrowError` if a table was resized, moved or cast after its first step, or
    if a loaded state is incomplete or has the wrong shape. The error is raised before anything
    changes.

Some code bypasses torch's function protocol and reads stale rows from a table. Examples are modules
made by `torch.jit.script` or `torch.jit.trace`, and `torch.func` transforms that take the table as
an input. Call `optimizer.settle()` before such code runs. You can't read a table during its own
step, for example in a signal handler. Tables don't support
`torch.__future__.set_swap_module_params_on_conversion`.

>>> import torch, hotrow
>>> model = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
>>> optimizer = hotrow.optim.AdamW(model.parameters())
>>> model(torch.tensor([2, 0, 2])).sum().backward()
>>> optimizer.step()
"""

from __future__ import annotations

import functools as _functools
from typing import Any as _Any

import torch.optim as _torch

from hotrow.optim.misuse import warn_of_dense_steps as _warn_of_dense_steps
from hotrow.optim.optimizer import RowOptimizer as _RowOptimizer
from hotrow.optim.rules import adadelta as _adadelta
from hotrow.optim.rules import adagrad as _adagrad
from hotrow.optim.rules import adam as _adam
from hotrow.optim.rules import adamax as _adamax
from hotrow.optim.rules import asgd as _asgd
from hotrow.optim.rules import nadam as _nadam
from hotrow.optim.rules import radam as _radam
from hotrow.optim.rules import rmsprop as _rmsprop
from hotrow.optim.rules import rprop as _rprop
from hotrow.optim.rules import sgd as _sgd


class SGD(_RowOptimizer, _torch.SGD):
    """A `torch.optim.SGD` that updates only the touched rows of a table.

    Without momentum or weight decay, missed steps cost nothing. Otherwise, applying K missed steps
    to a row requires multiplying at most 2 log2 K small matrices.
    """

    rule = _sgd.rule
    torch_class = _torch.SGD


class Adam(_RowOptimizer, _torch.Adam):
    """A `torch.optim.Adam` that updates only the touched rows of a table.

    Applying any number of missed steps to a row costs about as much as one step. With
    `weight_decay`, which is coupled in Adam, missed steps are replayed one by one. Use `AdamW` to
    avoid the replay.
    """

    rule = _adam.rule
    torch_class = _torch.Adam


class AdamW(_RowOptimizer, _torch.AdamW):
    """A `torch.optim.AdamW` that updates only the touched rows of a table.

    Applying any number of missed steps to a row costs about as much as one step.
    """

    rule = _adam.adamw_rule
    torch_class = _torch.AdamW


class Adamax(_RowOptimizer, _torch.Adamax):
    """A `torch.optim.Adamax` that updates only the touched rows of a table.

    Applying any number of missed steps to a row costs about as much as one step. With
    `weight_decay`, missed steps are replayed one by one.
    """

    rule = _adamax.rule
    torch_class = _torch.Adamax


class NAdam(_RowOptimizer, _torch.NAdam):
    """A `torch.optim.NAdam` that updates only the touched rows of a table.

    Applying any number of missed steps to a row costs about as much as one step. With coupled
    `weight_decay`, missed steps are replayed one by one. Pass `decoupled_weight_decay=True` to
    avoid the replay.
    """

    rule = _nadam.rule
    torch_class = _torch.NAdam


class RAdam(_RowOptimizer, _torch.RAdam):
    """A `torch.optim.RAdam` that updates only the touched rows of a table.

    Applying any number of missed steps to a row costs about as much as one step. With coupled
    `weight_decay`, missed steps are replayed one by one. Pass `decoupled_weight_decay=True` to
    avoid the replay.
    """

    rule = _radam.rule
    torch_class = _torch.RAdam


class Adagrad(_RowOptimizer, _torch.Adagrad):
    """A `torch.optim.Adagrad` that updates only the touched rows of a table.

    Missed steps cost nothing, because they don't change the row. With `weight_decay`, missed steps
    are replayed one by one.
    """

    rule = _adagrad.rule
    torch_class = _torch.Adagrad

    @_functools.wraps(_torch.Adagrad.__init__)  # type: ignore[misc]
    def __init__(self, *args: _Any, **kwargs: _Any) -> None:
        super().__init__(*args, **kwargs)
        self._drop_initial_state()


class Adadelta(_RowOptimizer, _torch.Adadelta):
    """A `torch.optim.Adadelta` that updates only the touched rows of a table.

    Applying K missed steps to a row requires multiplying at most 2 log2 K small matrices. With
    `weight_decay`, missed steps are replayed one by one.
    """

    rule = _adadelta.rule
    torch_class = _torch.Adadelta


class RMSprop(_RowOptimizer, _torch.RMSprop):
    """A `torch.optim.RMSprop` that updates only the touched rows of a table.

    Applying K missed steps to a row requires multiplying at most 2 log2 K small matrices. With
    `weight_decay`, hotrow runs torch's dense step, because the result depends on the rounding of
    every missed step.
    """

    rule = _rmsprop.rule
    torch_class = _torch.RMSprop


class ASGD(_RowOptimizer, _torch.ASGD):
    """A `torch.optim.ASGD` that updates only the touched rows of a table.

    Applying K missed steps to a row requires multiplying at most 2 log2 K small matrices.
    """

    rule = _asgd.rule
    torch_class = _torch.ASGD


class Rprop(_RowOptimizer, _torch.Rprop):
    """A `torch.optim.Rprop` that updates only the touched rows of a table.

    Applying a row's missed steps costs less than one step, because only the first missed step
    changes the state.
    """

    rule = _rprop.rule
    torch_class = _torch.Rprop


_warn_of_dense_steps(frozenset(cls.torch_class.__name__ for cls in _RowOptimizer.__subclasses__()))

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]
