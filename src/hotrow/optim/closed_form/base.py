"""The interface of closed forms, which apply many idle steps to a row at once.

`hotrow.optim.settle` computes the coefficients from the ledger and passes them to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Coefficients = tuple[Any, ...]


class ClosedForm(Protocol):
    """Fast-forward rows through missed steps, with coefficients computed from the ledger.

    `fast_forward` is compiled; `fast_forward_batch` runs in plain torch. Both functions are
    described in `hotrow.kernels.program.Program`.
    """

    fast_forward: Callable[..., Any]

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """Return the coefficients for `dtype` up to `end_step`.

        Returns None if coefficients for a later step have already been computed. In that case, the
        caller replays the missed steps.
        """

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Fast-forward rows from `steps` to `end_step`.

        Returns `w`, `slots`, and a bool tensor that marks the rows that reached `end_step`.
        """


def to_columns(numbers: NDArray[Any], like: Tensor) -> Tensor:
    """Split an (n, k) array into k tensors of shape (n, 1) with `like`'s dtype and device."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like)[:, :, None]
