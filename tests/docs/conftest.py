"""Fixtures for the documentation tests, which run under the same conditions as a reader's code."""

import pytest


@pytest.fixture(autouse=True)
def _small_one_hots() -> None:
    """Keep hotrow's default `min_entries`, which other tests override."""
