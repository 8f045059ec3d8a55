"""Test what hotrow guarantees on a real GPU; `make gpu` runs the same checks."""

import pytest
import torch

from benchmarks.gpu import checks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_promise(check):
    try:
        check()
    except checks.NotApplicableError as reason:
        pytest.skip(f"needs a GPU with other properties: {reason}")
