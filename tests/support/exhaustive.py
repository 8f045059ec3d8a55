"""Mark tests and cases that only `make test-all` runs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def grid(cases: Iterable[Any], decisive: Callable[..., bool]) -> list[Any]:
    """Return the cases of a parametrized test. Only `make test-all` runs those not `decisive`.

    `decisive` is a function that receives the values of a case.
    """
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if decisive(*case) else exhaustive) for case in several]
