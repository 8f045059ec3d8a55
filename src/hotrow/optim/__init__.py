"""torch's elementwise optimizers, which step tables at the cost of their touched rows.

Each takes torch's constructor arguments, trains every parameter of the model, and keeps its state
in torch's format. A table is a parameter that `hotrow.convert` has made one.
"""

from __future__ import annotations

import torch.optim as _torch

from hotrow.optim import adadelta as _adadelta
from hotrow.optim import adagrad as _adagrad
from hotrow.optim import adam as _adam
from hotrow.optim import adamax as _adamax
from hotrow.optim import asgd as _asgd
from hotrow.optim import nadam as _nadam
from hotrow.optim import radam as _radam
from hotrow.optim import rmsprop as _rmsprop
from hotrow.optim import rprop as _rprop
from hotrow.optim import sgd as _sgd
from hotrow.optim.stepping import RowOptimizer as _RowOptimizer


class SGD(_RowOptimizer, _torch.SGD):
    """`torch.optim.SGD`, with the row path for tables."""

    rule = _sgd.rule
    dense = _torch.SGD


class Adam(_RowOptimizer, _torch.Adam):
    """`torch.optim.Adam`, with the row path for tables."""

    rule = _adam.rule
    dense = _torch.Adam


class AdamW(_RowOptimizer, _torch.AdamW):
    """`torch.optim.AdamW`, with the row path for tables."""

    rule = _adam.rule
    dense = _torch.AdamW


class Adamax(_RowOptimizer, _torch.Adamax):
    """`torch.optim.Adamax`, with the row path for tables."""

    rule = _adamax.rule
    dense = _torch.Adamax


class NAdam(_RowOptimizer, _torch.NAdam):
    """`torch.optim.NAdam`, with the row path for tables."""

    rule = _nadam.rule
    dense = _torch.NAdam


class RAdam(_RowOptimizer, _torch.RAdam):
    """`torch.optim.RAdam`, with the row path for tables."""

    rule = _radam.rule
    dense = _torch.RAdam


class Adagrad(_RowOptimizer, _torch.Adagrad):
    """`torch.optim.Adagrad`, with the row path for tables."""

    rule = _adagrad.rule
    dense = _torch.Adagrad


class Adadelta(_RowOptimizer, _torch.Adadelta):
    """`torch.optim.Adadelta`, with the row path for tables."""

    rule = _adadelta.rule
    dense = _torch.Adadelta


class RMSprop(_RowOptimizer, _torch.RMSprop):
    """`torch.optim.RMSprop`, with the row path for tables."""

    rule = _rmsprop.rule
    dense = _torch.RMSprop


class ASGD(_RowOptimizer, _torch.ASGD):
    """`torch.optim.ASGD`, with the row path for tables."""

    rule = _asgd.rule
    dense = _torch.ASGD


class Rprop(_RowOptimizer, _torch.Rprop):
    """`torch.optim.Rprop`, with the row path for tables."""

    rule = _rprop.rule
    dense = _torch.Rprop


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
