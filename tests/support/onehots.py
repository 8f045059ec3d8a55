"""Create torch's and hotrow's one-hots, and assert that both behave the same."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot

IDS = torch.tensor([[1, 0, 4], [2, 2, 3]])
CLASSES = 5


def twins(dtype=torch.float32, requires_grad=False, ids=IDS, classes=CLASSES):
    """Return torch's and hotrow's one-hot of the same ids."""
    dense = F.one_hot(ids.clone(), classes).to(dtype).requires_grad_(requires_grad)
    return dense, one_hot(ids.clone(), classes, dtype, requires_grad=requires_grad)


def to_dense(x):
    """Convert a one-hot to a dense tensor; return other values unchanged."""
    return x.materialize() if isinstance(x, OneHot) else x


def outcome(run, *arguments):
    """Return the result of `run`, or the exception that it raises."""
    try:
        return run(*arguments)
    except Exception as error:
        return error


def assert_alike(actual, expected, strides=True):
    """Assert equal types, values, shapes, dtypes and so on, or similar errors."""
    if isinstance(expected, Exception):
        # hotrow raises the same error type as torch, or a subclass of it; the message may differ.
        assert isinstance(actual, Exception), f"torch raises {expected!r}, hotrow returns {actual}"
        assert isinstance(actual, type(expected)), f"hotrow raises {actual!r}, not {expected!r}"
        return
    if isinstance(actual, Exception):
        raise AssertionError(f"hotrow raises, but torch returns {expected}") from actual
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert actual.device == expected.device
        assert actual.requires_grad == expected.requires_grad
        if type(actual) is Tensor and not (expected.is_leaf and expected.requires_grad):
            assert actual._is_view() <= expected._is_view()
        if strides:
            assert actual.stride() == expected.stride()
            assert to_dense(actual).stride() == expected.stride()
        torch.testing.assert_close(
            to_dense(actual).detach(), expected.detach(), rtol=0, atol=0, equal_nan=True
        )
        return
    if isinstance(expected, tuple | list):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other, strides)
        return
    assert type(actual) is type(expected)
    assert actual == expected


@pytest.fixture
def never_materialized(monkeypatch):
    """Make the test fail if a one-hot is converted to a dense tensor."""

    def refuse(self, permanent=False):
        raise AssertionError("materialized")

    monkeypatch.setattr(OneHot, "materialize", refuse)


class LargestAllocation(TorchDispatchMode):
    """Record the size in bytes of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not each.is_meta and not isinstance(each, OneHot):
                self.size = max(self.size, each.untyped_storage().nbytes())
        return result


def saved_file(x):
    """Save x with torch.save to a file in memory, and return the file."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return buffer
