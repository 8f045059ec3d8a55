"""torch's elementwise optimizers, which step tables at the cost of their touched rows.

Each trains every parameter of the model. A table is a (V, D) parameter that `hotrow.convert` has
made one, of 100,000 entries or more unless asked for smaller ones; after any step each of its rows,
touched or not, is what torch's dense step would have left, whenever anyone looks: a row makes the
steps that it missed when it is next read.

    arguments   torch's, with its defaults. `foreach` and `fused` are for dense parameters, and a
                table takes no `capturable` and no `differentiable`.
    gradients   of look-ups (`nn.Embedding`, `nn.EmbeddingBag`). A table whose gradient is dense, as
                a tied head's is, takes torch's own step, and the report of `convert` says so.
    dtypes      float32, float64 and bfloat16 on the CPU are compiled when first used, once a
                machine; other dtypes and devices run in plain torch.
    state       `state_dict()` is in torch's format: it loads in torch's optimizer of the same name,
                and back. A run resumed from it has the bits of the run that saved it and went on.
    cost        of a step: time follows ids and touched rows, whatever V is and however long a row
                was idle. Where decay is coupled (but for SGD and ASGD) there is no closed form, and
                a row makes its missed steps one by one; RMSprop with decay takes torch's own
                dense step, as the rounding of a root decides where its weights go. Memory: torch's
                state, 4 bytes a row, and about 200 bytes a step for at most 65,536 steps.
    errors      `HotrowError`, before anything has changed: a table resized, moved or cast under its
                optimizer; a state of another shape, or a part of one.

Code that reads a table past torch's function protocol sees it as of its last settling:
`torch.jit.script`, transforms of `torch.func` that take it as an input, jagged ids. Call
`optimizer.settle()` before. A table cannot be read in the middle of its step, as a signal handler
might; nor swapped (`torch.__future__.set_swap_module_params_on_conversion`).

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
    """`torch.optim.SGD`, with the row path for tables."""

    rule = _sgd.rule
    torch_class = _torch.SGD


class Adam(_RowOptimizer, _torch.Adam):
    """`torch.optim.Adam`, with the row path for tables."""

    rule = _adam.rule
    torch_class = _torch.Adam


class AdamW(_RowOptimizer, _torch.AdamW):
    """`torch.optim.AdamW`, with the row path for tables."""

    rule = _adam.rule
    torch_class = _torch.AdamW


class Adamax(_RowOptimizer, _torch.Adamax):
    """`torch.optim.Adamax`, with the row path for tables."""

    rule = _adamax.rule
    torch_class = _torch.Adamax


class NAdam(_RowOptimizer, _torch.NAdam):
    """`torch.optim.NAdam`, with the row path for tables."""

    rule = _nadam.rule
    torch_class = _torch.NAdam


class RAdam(_RowOptimizer, _torch.RAdam):
    """`torch.optim.RAdam`, with the row path for tables."""

    rule = _radam.rule
    torch_class = _torch.RAdam


class Adagrad(_RowOptimizer, _torch.Adagrad):
    """`torch.optim.Adagrad`, with the row path for tables."""

    rule = _adagrad.rule
    torch_class = _torch.Adagrad


class Adadelta(_RowOptimizer, _torch.Adadelta):
    """`torch.optim.Adadelta`, with the row path for tables."""

    rule = _adadelta.rule
    torch_class = _torch.Adadelta


class RMSprop(_RowOptimizer, _torch.RMSprop):
    """`torch.optim.RMSprop`, with the row path for tables."""

    rule = _rmsprop.rule
    torch_class = _torch.RMSprop


class ASGD(_RowOptimizer, _torch.ASGD):
    """`torch.optim.ASGD`, with the row path for tables."""

    rule = _asgd.rule
    torch_class = _torch.ASGD


class Rprop(_RowOptimizer, _torch.Rprop):
    """`torch.optim.Rprop`, with the row path for tables."""

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
