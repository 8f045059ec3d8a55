"""Run a module's methods under a torch function mode, such as a search for one-hots."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from hotrow.conversion.finder import Finder
from hotrow.conversion.matmul import MatmulMode
from hotrow.conversion.origins import Record
from hotrow.conversion.outputs import materialize_outputs
from hotrow.conversion.sampling import call_states, is_traced, top_hooks
from hotrow.kernels.tracing import is_compiling, is_tracing

_records: dict[int, Record] = {}  # live modules only, keyed by id(module)


class Conversion(NamedTuple):
    """How a class was converted.

    Attributes:
        original: the class before the conversion.
        direction: "lookup" or "matmul".
        min_entries: the minimum size, in entries, of a one-hot whose products become lookups.
    """

    original: type[nn.Module]
    direction: str
    min_entries: int


def _record_of(model: nn.Module, conversion: Conversion) -> Record:
    """Return the record of the one-hots found in the model."""
    record = _records.get(id(model))
    if record is None:
        record = _records[id(model)] = Record(model, conversion.min_entries)
        weakref.finalize(model, _records.pop, id(model), None).atexit = False
    return record


def renew_record(model: nn.Module, conversion: Conversion) -> None:
    """Forget the one-hots found in the model, because it is converted differently from now on."""
    if id(model) in _records:
        _records[id(model)] = Record(model, conversion.min_entries)


def iter_records(model: nn.Module) -> Iterator[tuple[str, Record]]:
    """Yield (path, record) for each module whose calls were searched for one-hots."""
    for path, module in model.named_modules():
        if id(module) in _records:
            yield path, _records[id(module)]


def wrap(conversion: Conversion, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it activates the mode, unless an outer method has already done so."""
    original = conversion.original

    # Most calls skip the search. The overhead of such a call must be small even compared with the
    # torch operations of a small model, so this function does as little as possible before it
    # calls the method.
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        current: Any = getattr(original, name)
        if current is not method:  # the user has replaced it
            current = _replaced(original, name)
        state, traced = call_states.current, is_traced()
        hook: Any = None if traced else top_hooks(True)  # as in `saved_tensor_hook`
        if hook is not None:
            hook = hook[0]
        outer_hook = state.saved_tensor_hook
        if hook is outer_hook:
            return current(self, *args, **kwargs)
        mode: Any = None
        if not state.is_searching:
            record: Any = None if traced else _records.get(id(self))
            # A module that is being copied or loaded has no `training` attribute yet.
            finder = record and record.finders.get((name, getattr(self, "training", True)))
            if finder is None:
                mode = _first_mode(conversion, self, name, hook, args, kwargs)
            # Recomputing a checkpointed function must find the same one-hots, so always search.
            # torch.jit.trace would record what is true only for the ids of the example.
            elif not (is_tracing() or finder.sampler.skips(args, kwargs, hook is not None)):
                mode = Finder() if is_compiling() else finder
        state.saved_tensor_hook = hook
        try:
            if mode is None:
                return current(self, *args, **kwargs)
            return _run_under(mode, current, self, args, kwargs)
        finally:
            state.saved_tensor_hook = outer_hook

    if not hasattr(method, "__wrapped__"):  # `inspect.getfullargspec` doesn't look at `__wrapped__`
        vars(run)["__signature__"] = inspect.signature(method)
    return run


def _replaced(original: type[nn.Module], name: str) -> Any:
    """Return what has replaced a method of the class, as a function of the module."""
    value = inspect.getattr_static(original, name)
    if inspect.isfunction(value):
        return value
    bind = getattr(type(value), "__get__", None)  # of a static method, for example

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        function = value if bind is None else bind(value, module, type(module))
        return function(*args, **kwargs)

    return call


def _first_mode(
    conversion: Conversion, module: Any, name: str, hook: Any, args: Any, kwargs: Any
) -> Any:
    """Return the mode of a method that has no finder yet."""
    if conversion.direction == "matmul":
        return MatmulMode()
    if is_compiling():
        return Finder()
    if is_tracing():
        return None
    record = _record_of(module, conversion)
    finder: Any = Finder(record)
    record.finders[name, getattr(module, "training", True)] = finder
    finder.sampler.skips(args, kwargs, hook is not None)
    return finder


def _run_under(mode: Any, method: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Call a method under a mode, and materialize its outputs outside of the mode."""
    state, sampler = call_states.current, mode.sampler
    state.is_searching, state.sampler = True, sampler
    try:
        with mode:
            result = method(module, *args, **kwargs)
        return materialize_outputs(result)
    finally:
        state.is_searching, state.sampler = False, None
        if sampler is not None:
            sampler.end_search()
