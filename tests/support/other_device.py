"""Run the code for other devices on CPU tensors, and detect operations that wait."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotrow.kernels import devices
from hotrow.table.gradient import RowGradient

aten = torch.ops.aten
# On a GPU, these operations wait until all earlier operations have finished.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
}
# These methods copy a tensor from a GPU to the CPU. On a CPU tensor, they run no operation.
COPIES = "cpu", "numpy", "tolist"


@pytest.fixture
def other_device(monkeypatch):
    """Make hotrow treat every tensor as a GPU tensor, and every storage as shared."""
    monkeypatch.setattr(devices, "is_on_cpu", lambda tensor: False)
    monkeypatch.setattr(torch.UntypedStorage, "is_shared", lambda storage: True)


class Waits(TorchDispatchMode):
    """Record the operations that wait for a GPU, and the size of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, RowGradient) for each in types):
            return NotImplemented  # this mode records the operations in RowGradient's handler
        if function in WAITS:
            self.calls.append(function)
        result = function(*args, **kwargs or {})
        is_alias = any(each.alias_info is not None for each in function._schema.returns)
        results = [] if is_alias else result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in results if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result

    def __enter__(self):
        # While a dispatch mode is active, hotrow runs the id check in an operator. Hide this mode.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        for name in COPIES:
            self.patch.setattr(torch.Tensor, name, self._record(name))
        return super().__enter__()

    def _record(self, name):
        """Return a tensor method that records its own name."""
        method = getattr(torch.Tensor, name)

        def call(tensor, *args, **kwargs):
            self.calls.append(name)
            return method(tensor, *args, **kwargs)

        return call

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patch.undo()
