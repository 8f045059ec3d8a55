"""Record where a model's own code creates one-hots and how it uses them, for the report."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.conversion.sampling import Search, call_states
from hotrow.onehot.tensor import SCATTER_SIZE, OneHot
from hotrow.table.stack import location_of


def _current_search() -> Search:
    """Return the findings of the current search, or an empty `Search` if there is none."""
    sampler = call_states.current.sampler
    return Search() if sampler is None else sampler.search


# Operations other than products are worthwhile if the one-hot has at least this many times
# `min_entries` entries.
_USE_SIZE = 3


class Origin:
    """A line of code that creates one-hots, and how the one-hots were used.

    Attributes:
        path: the name of the module that contains the code, as in `named_modules`.
        location: the file and line.
        operation: the name of the operation that creates the one-hot, for the report.
        widths: the column counts of the one-hots, in order of appearance.
        product_counts: how often each product became a lookup.
        use_counts: how often each other operation used only the ids.
        fallback_counts: how often each operation materialized a one-hot.
        max_product_entries: the size of the largest one-hot whose product became a lookup.
        max_small_entries: the size of the largest one-hot that was too small for a lookup.
        is_returned: whether a converted method returned a one-hot to code outside the model.
        is_one_hot: whether the line creates one-hots; false for zeros that code may scatter into.
    """

    def __init__(self, record: Record, path: str, location: str, operation: str) -> None:
        self._record = record
        self.path, self.location, self.operation = path, location, operation
        self.widths: dict[int, None] = {}
        self.product_counts: Counter[tuple[bool, torch.Size]] = Counter()  # (columns, shape)
        self.use_counts: Counter[str] = Counter()
        self.fallback_counts: Counter[Any] = Counter()
        self.max_product_entries, self.max_small_entries, self.is_returned = 0, 0, False
        self.is_one_hot = operation != _ZEROS
        self._entries = 0  # the size of the latest one-hot

    @property
    def min_entries(self) -> int:
        """The minimum size, in entries, of a one-hot whose products become lookups."""
        return self._record.min_entries

    @property
    def is_used(self) -> bool:
        """Whether any operation used only the ids of these one-hots."""
        return bool(self.product_counts or self.use_counts)

    def record_one_hot(self, x: OneHot) -> None:
        """Record that this line created `x`."""
        self.widths[x.sizes[-1]] = None
        self._entries = x.entries
        if x.entries >= SCATTER_SIZE * self.min_entries:
            _current_search().used.add(self)  # every operation on `x` may be faster
        x.origins = frozenset([self])

    def record_product(self, weight: Tensor, columns: bool, entries: int) -> None:
        """Record that a product with this weight became a lookup."""
        self.max_product_entries = max(self.max_product_entries, entries)
        self.product_counts[columns, weight.shape] += 1
        _current_search().is_faster = True

    def record_use(self, func: Any, entries: int, is_faster: bool) -> None:
        """Record that this operation used only the ids.

        If `is_faster` is false, the operation saves time only if no other operation materializes
        the one-hot.
        """
        self.use_counts[func.__name__.strip("_")] += 1
        search = _current_search()
        search.is_faster |= is_faster
        if entries >= _USE_SIZE * self.min_entries:
            search.used.add(self)

    def record_dense(self, entries: int) -> None:
        """Record that a one-hot, or a tensor computed from it, was materialized."""
        if 2 * entries > self._entries:  # ignores small results, such as the sum of the rows
            _current_search().materialized.add(self)

    def record_fallback(self, func: Any) -> None:
        """Record that an operation without a rule materialized a one-hot."""
        self.fallback_counts[func] += 1

    def record_small_product(self, entries: int) -> None:
        """Record a product whose one-hot is too small for a lookup."""
        self.max_small_entries = max(self.max_small_entries, entries)

    def describe_widths(self) -> str:
        """Describe the column counts of the one-hots."""
        widths = sorted(self.widths)
        if len(widths) > 3:
            return f"{widths[0]:,} to {widths[-1]:,} columns"
        return f"{', '.join(f'{width:,}' for width in widths)} columns"

    def describe_products(self) -> list[str]:
        """Describe the products that became lookups."""
        return [
            f"linear({shape[1]}, {shape[0]})" if columns else f"matmul({shape[0]}, {shape[1]})"
            for columns, shape in self.product_counts
        ]

    def describe_uses(self) -> list[str]:
        """Return the names of the other operations that used only the ids."""
        return list(self.use_counts)

    def describe_fallbacks(self) -> list[str]:
        """Return the names of the operations that materialized a one-hot."""
        return [getattr(func, "__name__", str(func)).strip("_") for func in self.fallback_counts]


class Record:
    """The origins of the one-hots found in a model.

    Attributes:
        min_entries: the minimum size, in entries, of a one-hot whose products become lookups.
        finders: the finder of each method, keyed by the method's name and the training mode.
    """

    def __init__(self, model: nn.Module, min_entries: int) -> None:
        self._model = weakref.ref(model)
        self.min_entries = min_entries
        self.finders: dict[Any, Any] = {}
        self._origins: dict[tuple[int, int, Any], Origin] = {}
        self._codes: list[Any] = []  # kept alive, because their ids are keys of `_origins`
        self._lock = threading.Lock()

    def origins(self) -> list[Origin]:
        """Return the origins of one-hots in order of appearance."""
        return [origin for origin in self._origins.values() if origin.is_one_hot]

    def origin_in(self, frame: Any, func: Any) -> Origin:
        """Return the origin of the one-hot that a call to `func` in `frame` created."""
        key = id(frame.f_code), frame.f_lasti, func  # two calls on one line have two origins
        origin = self._origins.get(key)
        if origin is None:
            code = frame.f_code
            location = location_of(frame)
            operation = _OPERATIONS.get(func.__name__, func.__name__)
            with self._lock:
                new = Origin(self, self._path_of(frame), location, operation)
                origin = self._origins.setdefault(key, new)
                self._codes.append(code)
        return origin

    def _path_of(self, frame: Any) -> str:
        """Return the path of the innermost module whose method is on the call stack."""
        model = self._model()
        paths: dict[int, str] = (
            {} if model is None else {id(m): name for name, m in model.named_modules()}
        )
        while frame is not None:
            module_id = id(frame.f_locals.get("self"))
            if module_id in paths:
                return paths[module_id]
            frame = frame.f_back
        return ""


_ZEROS = "zeros.scatter"
_OPERATIONS = {
    "__getitem__": "eye[ids]", "embedding": "embedding(ids, eye)", "index_select": "eye[ids]",
    "__eq__": "ids == arange", "eq": "ids == arange",
    "__ne__": "ids != arange", "ne": "ids != arange", "not_equal": "ids != arange",
    "zeros": _ZEROS, "zeros_like": _ZEROS, "new_zeros": _ZEROS,
    "ones": _ZEROS, "ones_like": _ZEROS, "new_ones": _ZEROS,
    "full": _ZEROS, "full_like": _ZEROS, "new_full": _ZEROS,
}  # fmt: skip
