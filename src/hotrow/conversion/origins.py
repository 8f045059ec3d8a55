"""Record where a model's own code creates one-hots and how it uses them, for the report."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import nn

from hotrow.conversion.sampling import Search, call_states
from hotrow.conversion.uses import COUNT_SIZE, SmallSize, operation_name
from hotrow.locks import ForkSafeLock
from hotrow.onehot.parts import Field
from hotrow.onehot.size_limits import OTHER_SIZE, SCATTER_SIZE
from hotrow.onehot.tensor import OneHot
from hotrow.table.stack import location_of


def _current_search() -> Search:
    """Return the findings of the current search, or an empty `Search` if there is none."""
    sampler = call_states.current.sampler
    return Search() if sampler is None else sampler.search


class Origin:
    """A line of code that creates one-hots, and how the one-hots were used.

    Attributes:
        path: the name of the module that contains the code, as in `named_modules`.
        location: the file and line.
        operation: the name of the operation that creates the one-hot, for the report.
        widths: the column counts of the one-hots, in order of appearance.
        product_counts: how often each product became a lookup.
        use_counts: how often each other operation used only the ids.
        contraction_count: how often one of these operations was a contraction.
        small_uses: the operations that ran densely because the one-hot was small, each with the
            largest such size; None if the reason is not the number of entries.
        small_totals: like `small_uses`, for sums over the batch that counted the ids.
        fallback_counts: how often each operation materialized a one-hot.
        max_product_entries: the size of the largest one-hot whose product became a lookup.
        is_returned: whether a converted method returned a one-hot to code outside the model.
        is_one_hot: whether the line creates one-hots; false for zeros that code may scatter into.
    """

    def __init__(self, record: Record, path: str, location: str, operation: str) -> None:
        self._record = record
        self.path, self.location, self.operation = path, location, operation
        self.widths: dict[int, None] = {}
        self.product_counts: Counter[str] = Counter()
        self.use_counts: Counter[str] = Counter()
        self.contraction_count = 0
        self.small_uses: dict[str, SmallSize | None] = {}
        self.small_totals: dict[str, SmallSize] = {}
        self.fallback_counts: Counter[str] = Counter()
        self.max_product_entries, self.is_returned = 0, False
        self.is_one_hot = operation != _ZEROS
        self._entries = 0  # the size of the latest one-hot
        self._small_size: SmallSize | None = None  # of the operation that is running
        self._small_name = ""
        self._totals: dict[str, Total] = {}

    @property
    def min_entries(self) -> int:
        """The minimum size, in entries, of a one-hot whose products become lookups."""
        return self._record.min_entries

    @property
    def creation_cost(self) -> int:
        """The factor by which products of these one-hots need more entries."""
        return CREATION_COSTS.get(self.operation, 1)

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

    def replace_width(self, recorded: int, width: int) -> None:
        """Correct the column count: the class axis of a tensor of zeros is known only later."""
        if recorded != width:
            self.widths.pop(recorded, None)
            self.widths[width] = None

    def record_product(self, name: str, entries: int) -> None:
        """Record that the product with this name became a lookup."""
        self._small_size = None
        self.max_product_entries = max(self.max_product_entries, entries)
        self.product_counts[name] += 1
        _current_search().is_faster = True

    def record_use(self, func: Any, entries: int, is_faster: bool) -> None:
        """Record that this operation used only the ids.

        If `is_faster` is false, the operation saves time only if no other operation materializes
        the one-hot.
        """
        self._record_named_use(operation_name(func), entries, is_faster)

    def _record_named_use(self, name: str, entries: int, is_faster: bool) -> None:
        self._small_size = None
        self.use_counts[name] += 1
        search = _current_search()
        search.is_faster |= is_faster
        if entries >= COUNT_SIZE * self.min_entries:
            search.used.add(self)

    def record_contraction(self, func: Any, purpose: str, entries: int) -> None:
        """Record that a contraction used only the ids, for example a sum of rows by id."""
        self.contraction_count += 1
        self._record_named_use(operation_name(func, purpose), entries, is_faster=True)

    def record_straight_through(self) -> None:
        """Record that the tensor that was subtracted from a one-hot was added back."""
        self.use_counts["straight-through"] += 1
        for name in ("sub", "subtract"):
            if self.use_counts[name]:
                self.use_counts[name] -= 1
                break
        self.use_counts += Counter()  # removes names with a count of 0

    def total(self, func: Any, entries: int, is_single: bool) -> Total:
        """Return the origin of the sum or mean of such a one-hot over batch axes.

        Args:
            func: the function that computes the total.
            entries: the size of the one-hot.
            is_single: whether the total consists of a single row.
        """
        name = f"{operation_name(func)} over the batch"
        total = self._totals.setdefault(name, Total(self, name))
        total.entries, total.is_single = entries, is_single
        return total

    def record_total(self, name: str, entries: int) -> None:
        """Record that a total of a one-hot of this size was computed by counting its ids."""
        size = SmallSize(entries, 0, COUNT_SIZE * self.min_entries)
        if entries < size.min_entries:
            self.small_totals[name] = max(
                size, self.small_totals.get(name, size), key=lambda each: each.entries
            )
        else:
            self._record_named_use(name, entries, entries >= OTHER_SIZE * self.min_entries)

    def record_dense(self, entries: int) -> None:
        """Record that a one-hot, or a tensor computed from it, was materialized."""
        if 2 * entries > self._entries:  # ignores small results, such as the sum of the rows
            _current_search().materialized.add(self)

    def record_small_size(self, *size: float) -> None:
        """Record the `SmallSize` for which torch is as fast as the operation that is running."""
        self._small_size, self._small_name = SmallSize(*size), ""

    def record_small_product(self, name: str) -> None:
        """Record that the operation for which the one-hot is too small is this product."""
        self._small_name = name

    def record_small_contraction(self, func: Any, purpose: str) -> None:
        """Record that the operation for which the one-hot is too small is this contraction."""
        self._small_name = operation_name(func, purpose)

    def record_fallback(self, func: Any, too_small: bool, has_many_zeros: bool) -> None:
        """Record that an operation materialized a one-hot.

        Args:
            func: the torch function.
            too_small: whether torch is as fast for this one-hot; false if no rule applied.
            has_many_zeros: whether the one-hot has more entries than ids.
        """
        size, self._small_size = self._small_size, None
        if size is not None:
            self.record_small_use(self._small_name or operation_name(func), size)
        elif too_small:
            self.small_uses.setdefault(operation_name(func), None)
        elif has_many_zeros:
            self.fallback_counts[operation_name(func)] += 1

    def record_small_use(self, name: str, size: SmallSize) -> None:
        """Record that an operation ran densely, because the one-hot was small."""
        previous = self.small_uses.get(name)
        if previous is None or size.entries > previous.entries:
            self.small_uses[name] = size

    def record_returned(self, x: OneHot) -> None:
        """Record that a converted method returned `x` to code outside the model."""
        # Without ids, x is a result such as `one_hot - q`, which is dense in any case.
        self.is_returned |= any(isinstance(part, Field) for part in x.current_parts)

    def describe_widths(self) -> str:
        """Describe the column counts of the one-hots."""
        widths = sorted(self.widths)
        if len(widths) > 3:
            return f"{widths[0]:,} to {widths[-1]:,} columns"
        return f"{', '.join(f'{width:,}' for width in widths)} columns"

    def describe_products(self) -> list[str]:
        """Describe the products that became lookups."""
        return list(self.product_counts)

    def describe_small_uses(self) -> list[str]:
        """Describe the operations for which torch was as fast, with the limits."""
        uses = [
            f"{name} ran densely, because torch is as fast {f'with {size}' if size else 'here'}"
            for name, size in self.small_uses.items()
        ]
        totals = [
            f"{name} counted the ids, but torch is as fast with {size}"
            for name, size in self.small_totals.items()
            if name not in self.use_counts
        ]
        return uses + totals


class Total:
    """The origin of the sum of a one-hot's rows over the batch, such as `x.sum(0)`.

    Such a sum also stores ids, so it's a one-hot tensor. Computing its values means counting ids,
    which is a use of the one-hot, whatever the model then does with these few values.

    Attributes:
        entries: the size of the one-hot whose rows are added up.
        is_single: whether the sum consists of a single row.
    """

    def __init__(self, origin: Origin, name: str) -> None:
        self._origin, self._name = origin, name
        self.entries, self.is_single = 0, False
        self._small_size: SmallSize | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the origin, which also records all other uses."""
        return getattr(object.__getattribute__(self, "_origin"), name)

    def record_counts(self) -> None:
        """Record that the values were computed by counting ids."""
        self._origin.record_total(self._name, self.entries)

    def record_small_size(self, *size: float) -> None:
        """Record the `SmallSize` for which torch is as fast as the operation that is running."""
        self._small_size = SmallSize(*size)

    def record_small_product(self, name: str) -> None:
        """Record a product for which the sum is too small; such a sum is a bag of ids."""
        self._record_small_use(name)

    def record_small_contraction(self, func: Any, purpose: str) -> None:
        """Record a contraction for which the sum is too small."""
        self._record_small_use(operation_name(func, purpose))

    def _record_small_use(self, name: str) -> None:
        if self._small_size is not None:
            self._origin.record_small_use(name, self._small_size)

    def record_use(self, func: Any, entries: int, is_faster: bool) -> None:
        """Record that an operation on the sum used only the ids."""
        self._small_size = None
        self._origin.record_use(func, entries, is_faster)

    def record_fallback(self, func: Any, too_small: bool, has_many_zeros: bool) -> None:
        """Record that an operation read the values of the sum."""
        size, self._small_size = self._small_size, None
        self.record_counts()
        if not (size or too_small or self.is_single) and has_many_zeros:
            self._origin.record_fallback(func, too_small, has_many_zeros)

    def record_returned(self, x: OneHot) -> None:
        """Record that a converted method returned the sum, or a tensor computed from it."""
        self.record_counts()


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
        self._lock = ForkSafeLock()

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
            with self._lock.lock:
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
_EYE = "eye[ids]"
# Finding these one-hots takes longer than for `F.one_hot`.
CREATION_COSTS = {_ZEROS: 3, _EYE: 4, "embedding(ids, eye)": 4}
_OPERATIONS = {
    "__getitem__": _EYE, "embedding": "embedding(ids, eye)", "index_select": _EYE,
    "__eq__": "ids == arange", "eq": "ids == arange",
    "__ne__": "ids != arange", "ne": "ids != arange", "not_equal": "ids != arange",
    "zeros": _ZEROS, "zeros_like": _ZEROS, "new_zeros": _ZEROS,
    "ones": _ZEROS, "ones_like": _ZEROS, "new_ones": _ZEROS,
    "full": _ZEROS, "full_like": _ZEROS, "new_full": _ZEROS,
}  # fmt: skip
