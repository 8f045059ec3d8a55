"""Mark tests and cases that only `make test-all` runs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def grid(cases: Iterable[Any], decisive: Callable[..., bool]) -> list[Any]:
    """Return a test's cases; only `make test-all` runs those for which `decisive` is false.

    `decisive` receives the values of a case as arguments.
    """
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if decisive(*case) else exhaustive) for case in several]
