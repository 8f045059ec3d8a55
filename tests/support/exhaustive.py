"""Mark tests and cases that only `make test-all` runs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def grid(cases: Iterable[Any], decisive: Callable[..., bool]) -> list[Any]:
    """Return a test's cases. Only `make test-all` runs cases that aren't decisive.

    `decisive` is a function that takes the values of a case, and returns whether it is decisive.
    """
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if decisive(*case) else exhaustive) for case in several]
