"""Fixtures for the tests of the documentation: what a reader has, and nothing else."""

import pytest


@pytest.fixture(autouse=True)
def _small_one_hots() -> None:
    """A reader's one-hots have the limits that hotrow ships with."""
