"""What operations do with a one-hot that is not written out, a file for each kind of them.

A rule gives what torch gives for the tensor written out, or NotImplemented; then, and where there
is no rule, the tensor is written out and torch does it. All differentiate by what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotrow.onehot.registry import RULES, apply, dispatch, write_out
from hotrow.onehot.rules import arithmetic, dtypes, joining, products, scatter, shapes


def in_graph() -> list[Callable[..., Any]]:
    """What `torch.compile` puts into a graph as it is, and traces later, with everything else."""
    return [write_out, *RULES.values()]


__all__ = ["apply", "dispatch", "in_graph", "write_out"]
_ = arithmetic, joining, dtypes, products, scatter, shapes  # each registers its rules
