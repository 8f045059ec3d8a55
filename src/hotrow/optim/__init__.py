"""torch's elementwise optimizers, whose steps touch only the rows in the batch.

Each optimizer trains every parameter of the model. Dense parameters take torch's step. A table, a
(V, D) parameter that `hotrow.convert` converted (by default one of 100,000 entries or more), takes
a step that updates only its touched rows. Rows that no id selected would still move in dense
training, through momentum or weight decay. hotrow applies all the steps that such a row missed when
the row is next read. So every read returns what torch's dense step would have produced, up to
rounding.

Options
    The options are those of torch, with the same defaults. `foreach` and `fused` affect only dense
    parameters. Tables do not support `capturable` and `differentiable`.

Gradients
    Tables take row steps for gradients of lookups (`nn.Embedding`, `nn.EmbeddingBag`). A table with
    a dense gradient, such as a tied output head, takes torch's step, and
    `hotrow.convert.report(model)` says so.

Shapes and dtypes
    A table is (V, D), and so is each tensor of its state. On the CPU, kernels for float32, float64
    and bfloat16 are compiled at their first use on a machine. Other dtypes and devices run in plain
    torch.

State
    `state_dict()` has torch's format: torch's optimizer of the same name loads it, and the other
    way round. A run resumed from a checkpoint has the same bits as the run that saved it and
    continued.

Time
    A step costs time proportional to the ids and the touched rows, independent of V and, with a
    closed form, of the number of missed steps. With coupled weight decay (except in SGD and ASGD)
    there is no closed form: a row replays its missed steps one by one. RMSprop with weight decay
    takes torch's dense step.

Memory
    torch's state, 4 bytes for each row, and about 200 bytes for each step, of which at most 65,536
    are kept.

Errors
    `HotrowError`, before anything changes: a table was resized, moved or cast after its first
    step, or a loaded state is incomplete or has the wrong shape.

Some code reads a table without torch's function protocol, and gets stale rows: `torch.jit.script`,
`torch.func` transforms that take the table as an input, and jagged ids. Call `optimizer.settle()`
first. You cannot read a table during its own step, for example in a signal handler. Tables do not
support `torch.__future__.set_swap_module_params_on_conversion`.

>>> import torch, hotrow
>>> model = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
>>> optimizer = hotrow.optim.AdamW(model.parameters())
>>> model(torch.tensor([2, 0, 2])).sum().backward()
>>> optimizer.step()
"""

from __future__ import annotations

import torch.optim as _torch

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
    """`torch.optim.SGD`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: nothing without momentum and weight decay; otherwise a
    product of at most 2 log2 K small matrices for K steps.
    """

    rule = _sgd.rule
    torch_class = _torch.SGD


class Adam(_RowOptimizer, _torch.Adam):
    """`torch.optim.Adam`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: about one step, for any number. With `weight_decay`, which
    is coupled here, they are replayed one by one; `AdamW` does not replay.
    """

    rule = _adam.rule
    torch_class = _torch.Adam


class AdamW(_RowOptimizer, _torch.AdamW):
    """`torch.optim.AdamW`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: about one step, for any number.
    """

    rule = _adam.rule
    torch_class = _torch.AdamW


class Adamax(_RowOptimizer, _torch.Adamax):
    """`torch.optim.Adamax`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: about one step, for any number. With `weight_decay` they
    are replayed one by one.
    """

    rule = _adamax.rule
    torch_class = _torch.Adamax


class NAdam(_RowOptimizer, _torch.NAdam):
    """`torch.optim.NAdam`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: about one step, for any number. With coupled
    `weight_decay` they are replayed one by one; pass `decoupled_weight_decay=True` to avoid that.
    """

    rule = _nadam.rule
    torch_class = _torch.NAdam


class RAdam(_RowOptimizer, _torch.RAdam):
    """`torch.optim.RAdam`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: about one step, for any number. With coupled
    `weight_decay` they are replayed one by one; pass `decoupled_weight_decay=True` to avoid that.
    """

    rule = _radam.rule
    torch_class = _torch.RAdam


class Adagrad(_RowOptimizer, _torch.Adagrad):
    """`torch.optim.Adagrad`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: nothing, because they don't change the row. With
    `weight_decay` they are replayed one by one.
    """

    rule = _adagrad.rule
    torch_class = _torch.Adagrad


class Adadelta(_RowOptimizer, _torch.Adadelta):
    """`torch.optim.Adadelta`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: a product of at most 2 log2 K small matrices for K steps.
    With `weight_decay` they are replayed one by one.
    """

    rule = _adadelta.rule
    torch_class = _torch.Adadelta


class RMSprop(_RowOptimizer, _torch.RMSprop):
    """`torch.optim.RMSprop`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: a product of at most 2 log2 K small matrices for K steps.
    With `weight_decay` a table takes torch's dense step, whose result depends on the rounding of
    every missed step.
    """

    rule = _rmsprop.rule
    torch_class = _torch.RMSprop


class ASGD(_RowOptimizer, _torch.ASGD):
    """`torch.optim.ASGD`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: a product of at most 2 log2 K small matrices for K steps.
    """

    rule = _asgd.rule
    torch_class = _torch.ASGD


class Rprop(_RowOptimizer, _torch.Rprop):
    """`torch.optim.Rprop`, with steps that update only the touched rows of a table.

    Cost of the steps that a row missed: less than one step, because only the first changes state.
    """

    rule = _rprop.rule
    torch_class = _torch.Rprop


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
