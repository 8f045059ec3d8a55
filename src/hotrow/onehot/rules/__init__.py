"""Rules that run torch operations on a one-hot's parts, with one file per kind of operation.

A rule returns the result that torch gives for the dense tensor, or NotImplemented. Autograd derives
the gradient of a rule from the torch operations that the rule calls. Importing this package
registers all rules.
"""

from hotrow.onehot.rules import (
    autograd,
    concatenation,
    decoding,
    dtypes,
    einsum,
    elementwise,
    in_place,
    indexing,
    kron,
    losses,
    matrix_products,
    networks,
    products,
    reductions,
    running_counts,
    scatter,
    selection,
    shapes,
    sparse,
    storage,
)

__all__ = [
    "autograd",
    "concatenation",
    "decoding",
    "dtypes",
    "einsum",
    "elementwise",
    "in_place",
    "indexing",
    "kron",
    "losses",
    "matrix_products",
    "networks",
    "products",
    "reductions",
    "running_counts",
    "scatter",
    "selection",
    "shapes",
    "sparse",
    "storage",
]
