"""The one-hot tensor that stores ids, weights and column widths instead of zeros.

The rules for its operations are in `rules/`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from hotrow.kernels.tracing import (
    at_transform_level,
    is_compiling,
    is_in_function,
    is_transforming,
    outside_inference_mode,
    transform_level,
    without_make_fx,
)
from hotrow.onehot.dense import build_dense
from hotrow.onehot.gradient import Connect, ConnectLeaf, ZerosProxy
from hotrow.onehot.layout import Layout, contiguous_strides, plain_layout
from hotrow.onehot.parts import (
    DenseColumns,
    Field,
    Part,
    flatten,
    split_gradient,
    unflatten,
)
from hotrow.onehot.registry import RuleTensor

# Code below autograd excludes this key, but needs autograd's views to materialize views.
_VIEWS = torch._C.DispatchKey.ADInplaceOrView


class OneHot(RuleTensor):
    """A (*batch, C) tensor that consists of parts side by side along the class axis.

    A one-hot is *plain* if its class axis is the last axis and all entries that no id selects are
    zero. In other one-hots, a layout moves or splits the class axis, or `fill` replaces the zeros.

    Operations with a rule work on the parts. Any other operation materializes the dense tensor
    once and caches it. In-place writes to the dense tensor change this tensor and its views, as in
    torch.

    Attributes:
        sizes: the tensor's shape, cached because reading `shape` of a tensor subclass is slow.
        strides: the tensor's strides, cached.
        cached_dtype: the tensor's dtype.
        cached_device: the tensor's device.
        is_grad_leaf: whether the caller set requires_grad on this tensor.
        was_grad_leaf: whether `is_grad_leaf` is or was true.
        fill: the value of all entries that no id selects; 0 unless an operation such as `1 - x`
            changed it, and 0 if no part is a field. If the fill is not 0, every field has at most
            one id per row.
        difference: the one-hot x, the dense tensor p and its version, if this tensor was computed
            as x - p; otherwise None. Adding p to this tensor gives x.
        was_read: whether an operation may have used the parts instead of this tensor, so that
            autograd passes the operation's gradient to the parts, but not to this tensor.
        is_recorded: whether this tensor was created while autograd recorded operations. If not, no
            gradient flows from this tensor to the tensor that it is a view of.
        grad_holder: the proxy whose `grad` is that of this tensor, or None.
        parameter: the parameter that a module stores in place of this tensor, or None.

    Args:
        parts: the parts, in column order.
        dtype: the dtype of the dense tensor.
        grad_proxy: zeros of the same shape, through which the gradient flows to the one-hot that
            this tensor was derived from.
        parent: if this tensor is a view, the viewed tensor and the function that creates the view.
        origins: the lines of code that created the tensor, for the report.
        stride: the strides of the dense tensor; contiguous by default.
        dense_fn: computes the dense tensor; needed if the parts are rounded differently than in
            torch.
        fill: see the attribute.
        layout: the arrangement of the axes; by default, the class axis is the last axis.
    """

    _parts: tuple[Part, ...]
    _grad_proxy: Tensor | None
    _parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None
    _dense_fn: Callable[[], Tensor] | None
    # The version of `_dense` that matches the parts; None if `_dense` may differ from the parts.
    _dense_version: int | None
    _created_version: int  # the version of the dense tensor when it was created
    _graph: Any  # the autograd node that passes this tensor's gradient on; see `connect`
    # The autograd node of the dense tensor that `connect` connected this tensor to, or None if it
    # connected this tensor to the parts.
    _dense_node: Any
    _views: dict[int, weakref.ref[OneHot]]  # the live views, keyed by their `id()`
    was_grad_leaf: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    fill: float
    difference: tuple[OneHot, Tensor, int] | None
    was_read: bool
    is_recorded: bool
    grad_holder: Tensor | None
    parameter: nn.Parameter | None
    _axis_layout: Layout | None
    _plain_layout: Layout | None  # caches `axis_layout` if `_axis_layout` is None
    _is_graph_input: bool  # whether AOTAutograd traces a graph that this tensor is an input of
    _level: int  # how many transforms of `torch.func` were active when this tensor was created
    cached_dtype: torch.dtype
    cached_device: torch.device

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        parts: Sequence[Part],
        dtype: torch.dtype,
        grad_proxy: Tensor | None = None,
        parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None = None,
        origins: frozenset[Any] = frozenset(),
        stride: tuple[int, ...] | None = None,
        dense_fn: Callable[[], Tensor] | None = None,
        fill: float = 0,
        layout: Layout | None = None,
    ) -> OneHot:
        is_recorded = torch.is_grad_enabled()
        if not is_recorded:
            parts, grad_proxy = [part.map(_without_gradient) for part in parts], None
        first = parts[0].batch_tensor
        if layout is None or layout.is_plain:
            width = parts[0].width if len(parts) == 1 else sum(part.width for part in parts)
            sizes, layout = (*first.shape[:-1], width), None
        else:
            sizes = layout.sizes(first.shape[:-1])
        self: OneHot = Tensor._make_wrapper_subclass(
            cls, sizes, strides=stride, dtype=dtype, device=first.device
        )
        self.is_grad_leaf = self.was_grad_leaf = False
        self._parts, self._grad_proxy = tuple(parts), grad_proxy
        self._parent, self.origins, self._dense_fn = parent, origins, dense_fn
        self.sizes, self.cached_dtype, self.cached_device = sizes, dtype, first.device
        self.strides = contiguous_strides(sizes) if stride is None else stride
        self._views = {}
        has_fill = fill != 0 and any(isinstance(part, Field) for part in parts)
        self.fill, self._axis_layout, self._plain_layout = fill if has_fill else 0, layout, None
        self.difference, self.was_read, self.is_recorded = None, False, is_recorded
        self.grad_holder = self.parameter = None
        self._dense, self._dense_version, self._graph = None, 0, None
        self._created_version = 0
        self._dense_node, self._is_graph_input = None, False
        self._level = 0 if is_compiling() else transform_level()
        if self._has_trained_parts:
            self.connect()
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` sets everything."""

    @property
    def has_views(self) -> bool:
        """True if this tensor has views."""
        return bool(self._views)

    @property
    def live_views(self) -> list[OneHot]:
        """The views that still exist."""
        return [view for ref in self._views.values() if (view := ref()) is not None]

    @property
    def attached_views(self) -> list[OneHot]:
        """The views that still exist and pass their gradient on to this tensor."""
        return [view for view in self.live_views if view.is_recorded and not view.is_detached]

    @property
    def is_detached(self) -> bool:
        """True if this tensor is the result of `detach`."""
        return self._parent is not None and self._parent[1] is Tensor.detach

    @property
    def base(self) -> OneHot:
        """The tensor that this tensor is a view of, directly or through other views, or itself."""
        base = self
        while base._parent is not None and not base.is_detached:
            base = base._parent[0]
        return base

    @property
    def affects_other_gradients(self) -> bool:
        """True if a write to this tensor changes the gradient of a view or a retained gradient."""
        if not (self.cached_dtype.is_floating_point or self.cached_dtype.is_complex):
            return False
        return bool(self.base.attached_views) or self.base.retains_grad

    @property
    def has_leaf_view(self) -> bool:
        """True if the caller set requires_grad on a view of this tensor."""
        return any(view.is_grad_leaf or view.has_leaf_view for view in self.attached_views)

    def add_view(self, view: OneHot) -> None:
        """Keep track of a view for as long as it exists."""
        views, key = self._views, id(view)
        views[key] = weakref.ref(view, lambda _: views.pop(key, None))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The current parts; after an in-place write, a single part of dense columns."""
        parts = self.current_parts
        if parts is self._parts and not is_compiling():
            self.was_read |= _may_record_use()
        return parts

    @property
    def current_parts(self) -> tuple[Part, ...]:
        """Like `parts`, for code that doesn't use the parts in operations that autograd records."""
        if self.is_modified:
            return (DenseColumns(self.axis_layout.restore(self.materialize())),)
        if self._graph is not None:
            self._drop_old_graph()
        return self._parts

    @property
    def axis_layout(self) -> Layout:
        """The arrangement of the axes."""
        if self._axis_layout is not None:
            return self._axis_layout
        if self._plain_layout is None:
            self._plain_layout = plain_layout(len(self.sizes) - 1, self.sizes[-1])
        return self._plain_layout

    @property
    def width(self) -> int:
        """C, the number of classes."""
        return math.prod(self.axis_layout.classes)

    @property
    def is_plain(self) -> bool:
        """True if the class axis is the last axis and all entries that no id selects are 0."""
        return self._axis_layout is None and self.fill == 0

    @property
    def has_many_zeros(self) -> bool:
        """True if this tensor is not a vector, and has more entries than ids."""
        stored = sum(part.batch_tensor.numel() for part in self._parts)
        return len(self.sizes) > 1 and self.entries > stored

    @property
    def field(self) -> Field | None:
        """The field, if the one-hot consists of a single field; otherwise None."""
        parts = self.parts
        only = parts[0] if len(parts) == 1 else None
        return only if isinstance(only, Field) else None

    @property
    def grad_proxy(self) -> Tensor | None:
        """Zeros of the one-hot's shape if the one-hot needs a gradient, otherwise None."""
        if self.is_modified:
            return None
        if self.has_own_grad:
            return ZerosProxy.apply(self) if torch.is_grad_enabled() else None  # type: ignore[no-untyped-call]
        return self._grad_proxy

    def gradient_source(self, includes_later_uses: bool = False) -> Tensor:
        """Return the tensor whose gradient is that of this non-leaf tensor.

        The gradient includes that of the operations that have used this tensor and, if
        `includes_later_uses` is true, of the operations that will use it.

        Raises:
            RuntimeError: an operation has used the ids and the weights of this tensor, so its
                gradient with respect to the other entries isn't computed.
        """
        proxy = self._grad_proxy
        if proxy is not None and self.is_leaf_or_view_of_leaf:
            return proxy
        if self.was_read and self.needs_grad and not self.has_own_grad:
            # The dense tensor of a view depends on that of its parent, not on the proxy.
            is_view_of_dense = self._parent is not None and (
                includes_later_uses or self._dense is not None
            )
            if proxy is None or self._has_trained_tensors or is_view_of_dense:
                raise RuntimeError(
                    "the gradient of this one-hot is unknown, because hotrow has computed an "
                    "operation from its ids and weights; call x.retain_grad() on the one-hot x, or "
                    "x = x.to_dense(), before you use x"
                )
            return proxy
        return self.materialize(permanent=True, for_view=True)

    @property
    def has_own_grad(self) -> bool:
        """True if autograd treats this tensor itself as a leaf or as a function's result."""
        if self.is_grad_leaf:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            has_own_grad = self.requires_grad and self.grad_fn is not self._graph
        if has_own_grad and is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "torch.compile cannot trace the gradient of a one-hot that requires grad and was "
                "created outside of the graph; make it dense there: x = x.to_dense()"
            )
        return has_own_grad

    def _drop_old_graph(self) -> None:
        """Detach the parts if an `autograd.Function` has given this tensor another graph."""
        if self.has_own_grad:
            self._parts = tuple(part.map(_without_gradient) for part in self._parts)
            self._grad_proxy, self._graph = None, None

    @property
    def entries(self) -> int:
        """The number of entries of the dense tensor."""
        return math.prod(self.sizes)

    @property
    def is_modified(self) -> bool:
        """True if an in-place write changed the tensor, so it may no longer be a one-hot."""
        dense = self._dense
        if dense is not None and (
            self._dense_version is None or dense._version != self._dense_version
        ):
            return True
        return self._parent is not None and self._parent[0].is_modified

    @property
    def needs_grad(self) -> bool:
        """True if this tensor, or any of its weights or dense columns, requires grad."""
        return self.has_own_grad or self._has_trained_parts

    @property
    def _has_trained_parts(self) -> bool:
        if self._grad_proxy is not None and self._grad_proxy.requires_grad:
            return True
        return self._has_trained_tensors

    @property
    def _has_trained_tensors(self) -> bool:
        return any(tensor.requires_grad for tensor in flatten(self._parts)[0])

    @property
    def is_connected(self) -> bool:
        """True if this tensor itself is part of autograd's graph."""
        return self._graph is not None or self.has_own_grad

    @property
    def is_leaf_or_view_of_leaf(self) -> bool:
        """True if torch raises an error for any in-place change of this tensor."""
        if self.is_grad_leaf or self._parent is None:
            return self.is_grad_leaf
        return self.needs_grad and self._parent[0].is_leaf_or_view_of_leaf

    def materialize(self, permanent: bool = False, for_view: bool = False) -> Tensor:
        """Return the dense tensor that this tensor represents; all results share memory.

        Writing to the dense tensor also changes this tensor and, if this tensor is a view, its
        parent. With `permanent=True`, the dense tensor permanently replaces the parts, even if
        nothing is written to it.

        While autograd records operations, it refuses writes to the dense tensor of a leaf. With
        `for_view=True`, it doesn't, because the rules refuse writes to a view of a leaf.
        """
        is_modified = self.is_modified
        if not is_compiling() and transform_level() > self._level:
            with at_transform_level(self._level):
                return self.materialize(permanent, for_view)
        if self._dense is None:
            # Without the modes, a search for one-hots would find the tensors created here.
            with (
                without_make_fx(),
                torch._C.DisableTorchFunction(),
                outside_inference_mode(self.is_recorded or self._parent is None),
                torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False),
            ):
                if self._parent is None:
                    self._dense = self.compute_dense()
                else:
                    parent, view = self._parent
                    self._dense = view(parent.materialize(permanent and is_compiling(), True))
                    if self._grad_proxy is not None and self.is_leaf_or_view_of_leaf:
                        self._dense = self._connect_to_proxy(self._dense)
            is_inference = self._dense.is_inference()
            self._created_version = 0 if is_inference else self._dense._version
            has_version = not (is_modified or is_inference)
            self._dense_version = self._created_version if has_version else None
        if permanent:
            self._dense_version = None
            if self._parent is not None:
                self._parent[0].materialize(permanent=True)
        refuses_writes = not for_view and torch.is_grad_enabled() and self.is_leaf_or_view_of_leaf
        if not (self.has_own_grad or refuses_writes):
            return self._dense
        # If self stored the connected tensor, the two would keep each other alive forever.
        source = self if self.has_own_grad else self._dense
        with torch.enable_grad():
            connected: Tensor = ConnectLeaf.apply(  # type: ignore[no-untyped-call]
                self._dense.detach(), source, refuses_writes
            )
        return connected

    def materialize_views(self) -> None:
        """Materialize the views, which keep their memory and their graph if this tensor's change.

        A view that isn't materialized is created from this tensor when it is needed.
        """
        for view in self.live_views:
            view.materialize(permanent=True)
            view.materialize_views()

    def replace_memory(self, replace: Callable[[Tensor], Any]) -> None:
        """Give the dense tensor other memory, as `x.data = values` and `x.set_(values)` do.

        Raises:
            RuntimeError: the values have another shape, dtype or device, and autograd treats this
                tensor itself as a leaf or as a function's result.
        """
        self.materialize(permanent=True)
        self.materialize_views()
        assert self._dense is not None
        new = self._dense.new_empty(0)
        replace(new)
        is_same = (*new.shape, new.dtype, new.device) == (
            *self.sizes, self.cached_dtype, self.cached_device,
        )  # fmt: skip
        if self.has_own_grad:
            if not is_same:
                raise RuntimeError(
                    "the data of a one-hot that requires grad can only be replaced by a tensor of "
                    f"the same shape, dtype and device, but these are {tuple(new.shape)}, "
                    f"{new.dtype} and {new.device} instead of {self.sizes}, {self.cached_dtype} "
                    f"and {self.cached_device}; use x = values.requires_grad_()"
                )
            if new.stride() != self.strides:
                self._change_metadata(lambda t: t.as_strided_(new.shape, new.stride()))
        replace(self._dense)
        self.sizes, self.strides = tuple(new.shape), new.stride()
        self.cached_dtype, self.cached_device = new.dtype, new.device
        self._parts, self.fill = (DenseColumns(self._dense),), 0
        self._axis_layout = self._plain_layout = self._dense_fn = self.difference = None

    def _change_metadata(self, change: Callable[[Tensor], Any]) -> None:
        """Change the shape and strides that this tensor reports."""
        with (
            torch.no_grad(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            change(self)

    def column(self) -> Tensor | None:
        """Return the values of a column that shares no memory with its one-hot, otherwise None.

        The values are for code that only reads the column. Code that writes to the column uses
        `materialize`, which returns a view of the one-hot's dense tensor.
        """
        part = self._parts[0]
        is_separate = self._parent is not None and self._dense is None and self.is_plain
        if not is_separate or len(self._parts) > 1 or not isinstance(part, DenseColumns):
            return None
        if (
            not part.is_stored
            or self.is_modified
            or self.has_own_grad
            or self.grad_proxy is not None
        ):
            return None
        self.was_read |= _may_record_use()
        return part.values

    def materialize_for_write(self) -> Tensor:
        """Return the dense tensor for an in-place operation, which autograd then records."""
        if self._parent is not None:
            self._parent[0].materialize_for_write()
        dense = self.materialize(permanent=True)  # some kernels don't increment the version
        if torch.is_grad_enabled() and self.has_own_grad and not self.is_grad_leaf:
            self._dense = dense
            with torch._C.DisableTorchFunctionSubclass():
                self._graph = self.grad_fn
                if self.retains_grad:  # from now on, the gradient of the new values
                    dense.retain_grad()
                    dense.grad = self.grad
            self._forget_dense_views()
        return dense

    def _forget_dense_views(self) -> None:
        """Create the views again when they are needed, as views of the current dense tensor."""
        for view in self.attached_views:
            if view._dense is not None and view._dense.retains_grad:
                view.grad_holder = view._dense
            view._dense = None
            view._forget_dense_views()

    def wrap_view(self, view: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a view of the dense tensor, which `transform` creates, as a view of this tensor.

        Autograd doesn't tell this tensor about a write to a plain view, but `run_dense` connects
        this tensor to the graph after a write to the result.
        """
        if type(view) is not Tensor or view.layout != torch.strided or not view.ndim:
            return view
        parts = [DenseColumns(view.detach())]  # so that `__new__` doesn't connect the result yet
        result = OneHot(parts, view.dtype, None, (self, transform), stride=view.stride())
        result._parts = (DenseColumns(view),)
        result._dense, result._dense_version = view, None
        result.connect()
        self.add_view(result)
        return result

    def detach_in_place(self) -> None:
        """Detach this tensor from the graph that computed it, like `Tensor.detach_`."""
        self._parts = tuple(part.map(_without_gradient) for part in self._parts)
        self._grad_proxy, self.is_grad_leaf = None, False
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad:  # torch.export can't trace `detach_` of a subclass
                self.detach_()
        self._graph = self._dense_fn = None
        dense = self._dense
        if dense is not None:
            self._dense = dense.detach()
            if dense.retains_grad:
                self.grad_holder = dense
            elif dense.is_leaf:
                self._dense.grad = dense.grad

    @property
    def is_unused(self) -> bool:
        """True if the parts may be replaced.

        No view, dense tensor or graph depends on the parts, and this tensor isn't an input of an
        active transform. In compiled code, the tensor may have views in other graphs.
        """
        is_read = self._dense is not None or self._parent is not None or self.has_views
        if is_read or self.needs_grad or is_compiling():
            return False
        return transform_level() <= self._level

    def replace_parts(self, result: OneHot) -> None:
        """Replace the values in place with those of `result`, of the same shape and dtype."""
        self._parts, self._axis_layout, self.fill = result._parts, result._axis_layout, result.fill
        self._dense_fn, self.difference, self.was_read = result._dense_fn, None, False
        self.connect()

    def reshape_in_place(self, result: OneHot, change: Callable[[Tensor], Tensor]) -> None:
        """Adopt the shape and parts of `result`; `change` reshapes the dense tensor to match."""
        self._change_metadata(change)
        if self._dense is not None:
            change(self._dense)  # increments the version, so the dense tensor replaces the parts
        if self._parent is not None:
            parent, view = self._parent
            self._parent = parent, lambda t: change(view(t))
        if self._dense_fn is not None:
            dense_fn = self._dense_fn
            self._dense_fn = lambda: change(dense_fn())
        self._parts, self._axis_layout = result._parts, result._axis_layout
        self.sizes, self.strides, self._plain_layout = result.sizes, result.strides, None
        self._grad_proxy = result._grad_proxy
        self._views, self.difference = {}, None
        self.connect()

    def connect(self) -> None:
        """Make autograd pass this tensor's gradient on to the tensors that make up this tensor."""
        if is_compiling() or not torch.is_grad_enabled() or is_transforming():
            return
        if self.has_own_grad:
            return
        if self.is_modified:
            tensors, split = [self.materialize(for_view=True)], _same_gradient
        else:
            tensors, parts, layout = flatten(self._parts)[0], self._parts, self._axis_layout
            proxies = [] if self._grad_proxy is None else [self._grad_proxy]
            tensors += proxies

            def split(gradient: Tensor) -> list[Tensor | None]:
                rows = gradient if layout is None else layout.restore(gradient)
                return [*split_gradient(parts, rows), *[gradient] * len(proxies)]

        if any(tensor.requires_grad for tensor in tensors):
            if self.was_grad_leaf:  # the backward pass of an earlier use would end the process
                raise RuntimeError(
                    "autograd cannot record an in-place change of a one-hot that required grad "
                    "before; call it on x.clone()"
                )
            with torch._C.DisableTorchFunctionSubclass():
                Connect.apply(self, split, *tensors)  # type: ignore[no-untyped-call]
                self._graph = self.grad_fn
            self._dense_node = tensors[0].grad_fn if self.is_modified else None

    @property
    def _is_connected_to_dense(self) -> bool:
        """True if autograd passes this tensor's gradient on to the current dense tensor."""
        # After a write under `no_grad`, a view has another node.
        dense = self._dense
        return (
            dense is not None and self._dense_node is not None and dense.grad_fn is self._dense_node
        )

    def record_use(self) -> None:
        """Record that `autograd.Function` or a transform may have used this tensor itself."""
        if self._graph is not None and not self._is_connected_to_dense:
            self.was_read |= _may_record_use()

    def connect_all(self) -> None:
        """Connect this tensor, its base and their views to autograd's graph after a write."""
        remaining = [self.base]
        for x in remaining:
            if torch.is_grad_enabled():
                x.was_read = False  # the gradient is that of the new values
                x._retain_new_gradient()
                x.connect()
            elif not (x._is_connected_to_dense or torch.is_inference_mode_enabled()):
                with torch.enable_grad():
                    x.connect()
            remaining += x.attached_views

    def _connect_to_proxy(self, dense: Tensor) -> Tensor:
        """Return the dense tensor; its gradient flows to the proxy, like that of the rules."""
        result: Tensor = ConnectLeaf.apply(dense.detach(), self._grad_proxy, False)  # type: ignore[no-untyped-call]
        return result

    def _retain_new_gradient(self) -> None:
        """After a write, retain the gradient of the new values, as torch does."""
        if self.grad_holder is None or not self.is_modified:
            return
        dense = self.materialize(for_view=True)
        if dense.requires_grad:
            dense.retain_grad()
            dense.grad, self.grad_holder = self.grad_holder.grad, None

    def compute_dense(self) -> Tensor:
        """Compute the dense tensor without caching it."""
        if self._graph is not None:
            self._drop_old_graph()
        if self._dense_fn is not None:
            dense = self._dense_fn()
            if self._grad_proxy is None or self._has_trained_tensors or is_compiling():
                return dense
            return self._connect_to_proxy(dense)
        values = build_dense(
            self._parts, self._axis_layout, self.sizes, self.strides, self.cached_dtype, self.fill
        )
        if self.has_own_grad and not is_compiling():
            return values  # the caller connects the values to the graph
        proxy = self.grad_proxy
        return values if proxy is None else values + proxy

    def snapshot(self) -> OneHot:
        """Return a copy that later in-place writes do not change."""
        return OneHot(
            self.parts, self.cached_dtype, self.grad_proxy, None, self.origins, self.strides,
            fill=self.fill, layout=self._axis_layout,
        )  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        parts, proxy, axis_layout = self._parts, self._grad_proxy, self._axis_layout
        if not self.is_modified:
            parts = self.parts
        elif not self._is_graph_input:
            # Other operations would fail here, because AOTAutograd isn't tracing.
            parts, proxy, axis_layout = (DenseColumns(self.materialize()),), None, None
        elif self._dense is None or self._dense._version != self._created_version:
            raise RuntimeError(
                "torch.compile cannot change a one-hot that was created outside of the graph, or a "
                "view of it; make it dense there: x = x.to_dense()"
            )
        tensors, layout = flatten(tuple(map(_with_stored_values, parts)))
        if proxy is not None:
            tensors.append(proxy)
        if axis_layout is not None:  # a SymInt would keep the value of one call, as in `flatten`
            axis_layout = Layout(tuple(map(int, axis_layout.classes)), axis_layout.order)
        names = [f"_tensor_{i}" for i in range(len(tensors))]
        for name, tensor in zip(names, tensors, strict=True):
            setattr(self, name, tensor)
        return names, (self.cached_dtype, layout, proxy is not None, self.fill, axis_layout)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> OneHot:
        dtype, part_layout, has_proxy, fill, layout = context
        tensors = list(inner.values())
        proxy = tensors.pop() if has_proxy else None
        result = OneHot(
            unflatten(tensors, part_layout), dtype, proxy, stride=stride, fill=fill, layout=layout
        )
        result._is_graph_input = any(isinstance(t, FunctionalTensor) for t in inner.values())
        return result


def _may_record_use() -> bool:
    """Return whether autograd, or a function that it records, may use a tensor that is read now."""
    return torch.is_grad_enabled() or is_in_function() or is_transforming()


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _with_stored_values(part: Part) -> Part:
    if isinstance(part, Field) or part.is_stored:
        return part
    return DenseColumns(part.values)  # because torch.compile can't trace a running count


def _same_gradient(gradient: Tensor) -> list[Tensor | None]:
    return [gradient]
