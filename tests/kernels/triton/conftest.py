"""Run the kernels in Triton's interpreter."""

import pytest


@pytest.fixture
def interpret(monkeypatch):
    """Return a function that makes hotrow treat every tensor as a tensor on a GPU with Triton."""
    pytest.importorskip("triton", reason="needs Triton: run make test-all")
    from tests.support.interpreter import use_triton

    return lambda: use_triton(monkeypatch)
