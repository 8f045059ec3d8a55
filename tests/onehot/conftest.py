"""Check the dtypes of each one-hot that a test creates."""

import pytest
import torch

from hotrow.onehot.parts import Field
from hotrow.onehot.tensor import OneHot

_new = OneHot.__new__


def _checked(cls, parts, dtype, *args, **kwargs):
    if not torch.compiler.is_compiling():
        stored = [each for each in parts if isinstance(each, Field) or each.is_stored]
        values = [each.weights if isinstance(each, Field) else each.values for each in stored]
        assert all(each is None or each.dtype == dtype for each in values)
    return _new(cls, parts, dtype, *args, **kwargs)


@pytest.fixture(autouse=True)
def _check_dtypes(monkeypatch):
    monkeypatch.setattr(OneHot, "__new__", staticmethod(_checked))
