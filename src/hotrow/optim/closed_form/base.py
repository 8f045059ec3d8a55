"""The closed form of a rule: many steps without a gradient at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Coefficients = tuple[Any, ...]


class ClosedForm(Protocol):
    """Fast-forwards rows over missed steps, with coefficients computed from the ledger.

    `fast_forward` is compiled, `fast_forward_batch` runs in plain torch; both are described in
    `hotrow.kernels.program.Program`.
    """

    fast_forward: Callable[..., Any]

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """The coefficients for `dtype` and `end_step`; None if it was called for a later step."""

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """`w` and `slots` of rows at `steps`, brought to `end_step`; and which rows reached it."""


def to_columns(numbers: NDArray[Any], like: Tensor) -> Tensor:
    """(n, k) numbers of n rows as k tensors (n, 1), with the dtype and device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like)[:, :, None]
