"""What `make test` leaves to `make test-all`: the rest of a grid of which a few cases decide."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def grid(cases: Iterable[Any], decisive: Callable[..., bool]) -> list[Any]:
    """The cases of a parametrized test; those that are not decisive run in `make test-all` only.

    `decisive` takes the values of a case.
    """
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if decisive(*case) else exhaustive) for case in several]
