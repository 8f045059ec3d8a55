"""A way over many steps without a gradient at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Memo = tuple[Any, ...]


class Shortcut(Protocol):
    """Keeps up with a ledger what its jumps need: `jump` compiled, `leap` in plain torch.

    `jump` and `leap` are described at `kernels.rows.Program`.
    """

    jump: Callable[..., Any]

    def advance(self, entries: NDArray[np.float64], upto: int, dtype: torch.dtype) -> Memo | None:
        """The memo for jumps of a table of `dtype` to step `upto`; None if it is beyond that."""

    def leap(
        self, w: Tensor, slots: tuple[Tensor, ...], at: NDArray[np.int64], upto: int, memo: Memo
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """`w` and `slots` of rows at steps `at`, brought to `upto`; and which rows could be."""


def columns(numbers: NDArray[Any], like: Tensor) -> Tensor:
    """(n, k) numbers of n rows as k tensors (n, 1), to compute with tensors as `like`."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like)[:, :, None]
