"""A way over many steps without a gradient at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Shortcut(Protocol):
    """Keeps up with a ledger what its `jump` needs (see `kernels.rows.Program`)."""

    jump: Callable[..., Any]

    def advance(self, entries: NDArray[np.float64], upto: int) -> tuple[Any, ...] | None:
        """The memo for jumps to step `upto`; None if it is beyond that step already."""
