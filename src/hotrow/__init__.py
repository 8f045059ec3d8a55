"""Embedding tables for PyTorch: exact dense training that updates only the touched rows."""

from importlib import import_module as _import_module
from typing import Any as _Any

from hotrow import optim
from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.figures.figure import figure
from hotrow.layers import Embedding, EmbeddingBag, OneHotLinear
from hotrow.onehot.encoding import one_hot
from hotrow.verify.check import check
from hotrow.verify.compare import compare
from hotrow.verify.cost import cost

__version__ = "0.2.0"
__all__ = [
    "Embedding",
    "EmbeddingBag",
    "HotrowError",
    "OneHotLinear",
    "__version__",
    "check",
    "compare",
    "convert",
    "cost",
    "figure",
    "one_hot",
    "optim",
]


def __getattr__(name: str) -> _Any:
    """Import a subpackage when it is first used, because importing it takes time."""
    if name in ("disk", "distributed", "vocabulary"):
        return _import_module(f"hotrow.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
