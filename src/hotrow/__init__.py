"""hotrow: a linear layer over one-hot input is a row look-up, proven each time."""

from importlib.metadata import version as _version

from hotrow import optim
from hotrow._check import check
from hotrow._compare import compare
from hotrow._convert import convert
from hotrow._cost import cost
from hotrow.errors import HotrowError
from hotrow.figures import figure
from hotrow.layers import Embedding, EmbeddingBag, OneHotLinear
from hotrow.onehot import one_hot

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
