"""The interface of closed forms, which apply many idle steps to a row at once.

`Ledger.steps` computes the coefficients, and `RowUpdater` passes them to the kernels.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward

Coefficients = tuple[Any, ...]


class ClosedForm(Protocol):
    """Fast-forward rows through missed steps, with coefficients computed from the ledger."""

    @property
    def fast_forward(self) -> FastForward:
        """The functions that use the coefficients; every access returns an equal tuple."""

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """Return the coefficients for `dtype` up to `end_step`.

        Returns None if coefficients for a later step have already been computed. In that case, the
        caller replays the missed steps.
        """


def to_columns(numbers: NDArray[Any], like: Tensor) -> Tensor:
    """Split an (n, k) array into k tensors of shape (n, 1) with `like`'s dtype and device."""
    return torch.from_numpy(np.ascontiguousarray(numbers.T)).to(like)[:, :, None]
