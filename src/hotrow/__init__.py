"""Embedding tables for PyTorch: exact dense training that updates only the touched rows."""

from importlib.metadata import version as _version

from hotrow import optim
from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.figures.figure import figure
from hotrow.layers import Embedding, EmbeddingBag, OneHotLinear
from hotrow.onehot.encoding import one_hot
from hotrow.verify.check import check
from hotrow.verify.compare import compare
from hotrow.verify.cost import cost

__version__ = _version("hotrow")
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
