"""Run code for an NVIDIA GPU on the CPU: "cuda" selects CPU tensors, and kernels are interpreted.

This module replaces only what hotrow's GPU code uses. Each replacement checks as much of the
real contract as the CPU allows. For example, torch's synchronization check raises an error for an
operation that waits for the device, and a CUDA graph replays the recorded operations with the same
memory.
"""

import ctypes
import functools
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hotrow.kernels.triton.ledger import DeviceLedger
from tests.support import interpreter  # import this module before Triton
from tests.support.other_device import Waits

if True:  # import Triton only after setting the environment variable
    from triton.runtime.interpreter import GridExecutor

FACTORIES = "tensor", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange"


def on_cpu(value):
    """Return the CPU instead of a CUDA device, and every other value unchanged."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def with_cpu(function):
    """Wrap a function so that the CPU replaces CUDA devices in its arguments."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        arguments = {name: on_cpu(value) for name, value in kwargs.items()}
        return function(*map(on_cpu, args), **arguments)

    return call


class Generator(torch.Generator):
    """A generator on the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


class Autocast(torch.autocast):
    """Autocast on the CPU."""

    __init__ = with_cpu(torch.autocast.__init__)


class GradScaler(torch.amp.GradScaler):
    """A gradient scaler on the CPU."""

    __init__ = with_cpu(torch.amp.GradScaler.__init__)


def compile_on_cpu(compile_model, model):
    """Return a compiled model.

    This function doesn't use the default backend, which takes half a minute and has nothing to do
    with hotrow's kernels.
    """
    compiled = compile_model(model, backend="eager")

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            return compiled(*args)

    return run


class Event:
    """Measure time with Python's clock."""

    def __init__(self, enable_timing=False):
        self.seconds = None

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.seconds - self.seconds)


class Stream:
    """A stream on which operations run immediately."""

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class SyncCheck:
    """torch's check for operations that wait for the GPU."""

    def __init__(self):
        self.waits = None

    def set_mode(self, mode):
        if mode == "error":
            self.waits = Waits()
            self.waits.__enter__()
            return
        waits, self.waits = self.waits, None
        waits.__exit__(None, None, None)
        assert waits.calls == [], waits.calls


class Graph:
    """Recorded operations and kernel launches, with the memory that they read and write.

    Like a real graph, it holds no references to tensors from before the capture.
    """

    def __init__(self):
        self.calls, self.results = [], []

    def replay(self):
        assert self.calls
        with torch.no_grad():
            for call in self.calls:
                call()

    def add(self, function, args, kwargs, results=()):
        """Record a call; for a torch operation that has already run, `results` has its results."""
        args, kwargs, memory = tree_map(memory_of, (args, kwargs, results))
        self.results += results

        def run():
            found = function(*args, **kwargs)
            for old, new in zip(memory, tensors_in(found) if memory else (), strict=True):
                old.copy_(new)

        self.calls.append(run)


def memory_of(value):
    """Return a tensor with the same memory but no reference to it; return other values as is."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    storage = value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    with _disable_current_modes():
        flat = torch.frombuffer(memory, dtype=value.dtype)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def tensors_in(result):
    return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Record every operation in a graph, and reject operations that wait."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.waits = graph, Waits()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = self.waits.__torch_dispatch__(function, types, args, kwargs)
        assert self.waits.calls == []
        if result is not NotImplemented:
            is_new = all(each.alias_info is None for each in function._schema.returns)
            results = tensors_in(result) if is_new else []
            self.graph.add(function, args, kwargs or {}, results)
        return result


def refuse_upload(*args):
    raise AssertionError("a graph would upload the same values in each replay")


def use_fake_cuda(monkeypatch):
    """Make hotrow treat CPU tensors as tensors on a GPU, and replace functions of torch.cuda."""
    interpreter.use_triton(monkeypatch)
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, with_cpu(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "to", with_cpu(torch.Tensor.to))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor.to("cuda", copy=True))
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module.to("cuda"))
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "autocast", Autocast)
    monkeypatch.setattr(torch.amp, "GradScaler", GradScaler)
    monkeypatch.setattr(torch, "compile", functools.partial(compile_on_cpu, torch.compile))
    executor, capturing, sync = GridExecutor.__call__, [], SyncCheck()

    def launch(self, *args, **kwargs):
        if not capturing:
            return executor(self, *args, **kwargs)
        # A captured kernel doesn't run.
        return capturing[-1].add(functools.partial(executor, self), args, kwargs)

    @contextmanager
    def capture(graph):
        with ExitStack() as stack:
            capturing.append(graph)
            stack.callback(capturing.pop)
            # hotrow uses its own operator if a dispatch mode is active.
            count = torch._C._len_torch_dispatch_stack
            torch._C._len_torch_dispatch_stack = lambda: 0
            stack.callback(setattr, torch._C, "_len_torch_dispatch_stack", count)
            stack.enter_context(Recorder(graph))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(DeviceLedger, "_upload", refuse_upload)
            yield

    @contextmanager
    def stream(chosen):
        yield

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr("hotrow.kernels.devices.is_capturing", lambda tensor: bool(capturing))
    current = Stream()
    properties = SimpleNamespace(name="an interpreter", major=0, minor=0)
    replacements = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1000,
        "get_device_properties": lambda device: properties,
        "set_sync_debug_mode": sync.set_mode,
        "current_stream": lambda: current,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
