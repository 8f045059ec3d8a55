"""The rules: what operations do with a one-hot, a file for each kind of operation.

A rule gives what torch gives for the materialized tensor, or NotImplemented. Rules differentiate by
the parts they are made of. Importing this package registers them all.
"""

from hotrow.onehot.rules import (
    arithmetic,
    autograd,
    concatenation,
    dtypes,
    indexing,
    products,
    scatter,
    shapes,
    storage,
)

__all__ = [
    "arithmetic",
    "autograd",
    "concatenation",
    "dtypes",
    "indexing",
    "products",
    "scatter",
    "shapes",
    "storage",
]
