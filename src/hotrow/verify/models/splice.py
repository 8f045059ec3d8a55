"""The literal product in place of each look-up of a converted model, and both held together.

All that follows a product then gets the bits that the plain model has, and what differs can only be
the look-ups, each of which is held against its product on the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hotrow.onehot.parts import Columns, flatten, unflatten
from hotrow.onehot.tensor import OneHot
from hotrow.table.metadata import NO_VALUES
from hotrow.table.nested import within
from hotrow.table.parameter import Table
from hotrow.verify.agreement import Agreement, Bound, agreement
from hotrow.verify.models.products import Product, Swap, Watch


class Splice(Watch):
    """Goes on with each product, and keeps what its look-up gave to hold against it.

    The gradient of a weight that is a parameter, or a view of one, is the look-up's; all others
    are the product's. After the gradients were computed, `finish` holds those of the look-ups
    against the products', and `bound_of` says how far those of the weights may differ.

    Attributes:
        found: one agreement for each result of each product.
        unit: how coarse the coarsest dtype is that a product was computed in; its eps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Agreement] = []
        self.unit = 0.0
        self._given: list[tuple[Product, Tensor]] = []
        self._elsewhere: set[int] = set()
        self._sums: dict[int, tuple[Tensor, Tensor, bool, torch.dtype]] = {}
        self._keep: list[Any] = []  # whose id is in use

    def passed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note which parameters are used by something else."""
        if func not in NO_VALUES:
            self._elsewhere.update(map(id, within((args, kwargs), nn.Parameter)))

    def met(self, product: Product, result: Tensor) -> Tensor:
        """The product, with the look-up's gradient."""
        with torch.no_grad():
            dense = product.run(lambda t: _plain(t).detach())
        bound = self._bound(product, dense) if dense.is_floating_point() else None
        if dense.is_floating_point():
            self.unit = max(self.unit, torch.finfo(_coarsest(product, dense)).eps)
        self.found.append(compared(f"{product.name}", result, dense, bound))
        if not result.requires_grad:
            return dense
        dense = product.run(lambda t: _plain(t).detach() if _direct(product, t) else _plain(t))
        looked_up = product.run(lambda t: t if _direct(product, t) else t.detach())
        spliced: Tensor = _Spliced.apply(self, product, dense, looked_up)  # type: ignore[no-untyped-call]
        return spliced

    def given(self, product: Product, gradient: Tensor) -> None:
        """The gradient of a product's result."""
        self._given.append((product, gradient))

    def finish(self) -> None:
        """Hold the gradients against each other that the products were given."""
        with torch.enable_grad():
            for product, gradient in self._given:
                self._sum_up(product, gradient)
                self._hold(product, gradient)
        self._given.clear()

    def _bound(self, product: Product, result: Tensor) -> Bound:
        """How far two ways to add the terms of this result may be apart."""
        with torch.no_grad():
            sizes = _wide(product, lambda t: t.detach().double().abs())
            terms = _wide(product, lambda t: (t.detach() != 0).double())
        return _apart(terms, sizes, _multiplies(product), _coarsest(product, result))

    def _sum_up(self, product: Product, gradient: Tensor) -> None:
        """Add the terms of the weights' gradients up, by parameter."""
        direct = [weight for weight in product.weights if _direct(product, weight)]
        if not direct:
            return
        sizes = _gradients(product, gradient.double().abs(), direct, lambda t: t.double().abs())
        terms = _gradients(product, (gradient != 0).double(), direct, lambda t: (t != 0).double())
        for weight, of_sizes, of_terms in zip(direct, sizes, terms, strict=True):
            leaf = _leaf(weight)
            assert leaf is not None
            if id(leaf) not in self._sums:
                zeros = torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device)
                self._sums[id(leaf)] = zeros, zeros.clone(), False, leaf.dtype
                self._keep.append(leaf)
            all_terms, all_sizes, multiplies, before = self._sums[id(leaf)]
            for total, added in ((all_terms, of_terms), (all_sizes, of_sizes)):
                _place(total, leaf, weight).add_(added)
            dtype = max(
                before, _coarsest(product, gradient), key=lambda each: torch.finfo(each).eps
            )
            multiplies |= _multiplies(product)
            self._sums[id(leaf)] = all_terms, all_sizes, multiplies, dtype

    def bound_of(self, parameter: Tensor, gradient: Tensor) -> Bound | None:
        """How far two ways to add its gradient up may be apart; None if no look-up is in it."""
        if id(parameter) not in self._sums:
            return None
        terms, sizes, multiplies, dtype = self._sums[id(parameter)]
        if id(parameter) in self._elsewhere:  # a term more, of an unknown size
            terms, sizes = terms + 1, 2 * sizes + gradient.double().abs()
        return _apart(terms, sizes, multiplies, dtype)

    def _hold(self, product: Product, gradient: Tensor) -> None:
        """The gradients of what is not a weight: dense columns, scales, computed weights."""
        tensors, layout = flatten(product.x.parts)
        own = [t for t in tensors if t.requires_grad]
        others = [t for t in (product.other, *product.weights) if t is not None]
        others = [t for t in others if t.requires_grad and not _direct(product, t)]
        wanted = [*own, *others]
        if not wanted:
            return

        def leaves(swap: Swap, cotangent: Tensor, kind: torch.dtype | None, dense: bool) -> Any:
            made = {id(t): swap(t.detach()).requires_grad_() for t in wanted}

            def made_of(t: Tensor) -> Tensor:
                floating = t.is_floating_point()
                return made[id(t)] if id(t) in made else swap(t.detach()) if floating else t

            parts = unflatten(map(made_of, tensors), layout)
            x = OneHot(parts, kind or product.x.kind)
            result = product.run(
                lambda t: (x.write_out() if dense else x) if t is product.x else made_of(t)
            )
            return torch.autograd.grad(result, list(made.values()), cotangent)

        def same(t: Tensor) -> Tensor:
            return t.clone()

        device = gradient.device.type
        with torch.autocast(device, dtype=product.autocast, enabled=product.autocast is not None):
            by_look_up = leaves(same, gradient, None, dense=False)
            by_product = leaves(same, gradient, None, dense=True)
        with torch.autocast(device, enabled=False):
            kind = torch.float64
            sizes = leaves(lambda t: t.double().abs(), gradient.double().abs(), kind, dense=True)
            terms = leaves(lambda t: (t != 0).double(), (gradient != 0).double(), kind, dense=True)
        dtype = _coarsest(product, gradient)
        for found, of_product, count, size in zip(
            by_look_up, by_product, terms, sizes, strict=True
        ):
            what = f"gradient through {product.name}"
            self.found.append(compared(what, found, of_product, _apart(count, size, True, dtype)))


class _Spliced(torch.autograd.Function):
    """The product's values; its gradient goes to it and to the look-up."""

    @staticmethod
    def forward(ctx: Any, splice: Splice, product: Product, dense: Tensor, found: Tensor) -> Tensor:
        ctx.told = splice, product
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor]:
        splice, product = ctx.told
        splice.given(product, gradient.detach().clone())
        return None, None, gradient, gradient


def compared(what: str, a: Tensor, b: Tensor, bound: Bound | None = None) -> Agreement:
    """`agreement`, also of tensors that cannot be compared value by value: these differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return Agreement(what, max(a.numel(), b.numel()), 0, "different", 0, float("inf"), None)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return agreement(what, a.contiguous(), b.contiguous(), bound)


def at(values: Tensor) -> Bound:
    """A bound that is written out."""
    columns = values.shape[-1] if values.ndim else 1
    by_row = values.reshape(-1, max(columns, 1))
    return lambda places: by_row[places[:, 0], places[:, 1]]


def _apart(terms: Tensor, sizes: Tensor, multiplies: bool, dtype: torch.dtype) -> Bound:
    """From numbers of terms and sums of their sizes; see `_bounds.rounding_bounds`.

    A product is rounded once more, and so is half precision, by some.
    """
    info = torch.finfo(dtype)
    roundings = (terms + 1 if multiplies or info.bits < 32 else terms - 1).clamp(min=0)
    allowed = 2 * roundings * (info.eps / 2 * sizes + info.smallest_normal * info.eps)
    allowed = torch.where(sizes == 0, 0.0, allowed)
    return at(torch.where((allowed >= sizes / 8) & (allowed > 0), torch.inf, allowed))


def _coarsest(product: Product, result: Tensor) -> torch.dtype:
    """The dtype that rounds most, among the product's."""
    kinds = {result.dtype, *(weight.dtype for weight in product.weights)}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps)


def _multiplies(product: Product) -> bool:
    """Whether a term is rounded itself: with ones only, it is an entry of the weight."""
    if product.other is not None:
        return True
    return any(isinstance(p, Columns) or p.weights is not None for p in product.x.parts)


def _wide(product: Product, swap: Swap) -> Tensor:
    with torch.autocast(product.x.place.type, enabled=False):
        return product.run(lambda t: swap(_plain(t)))


def _gradients(
    product: Product, cotangent: Tensor, direct: list[Tensor], swap: Swap
) -> tuple[Tensor, ...]:
    """Of the product of `swap` of its tensors, as to the weights in `direct`."""
    made = {id(weight): swap(weight.detach()).requires_grad_() for weight in direct}

    def made_of(t: Tensor) -> Any:
        return made[id(t)] if id(t) in made else swap(_plain(t).detach())

    with torch.autocast(cotangent.device.type, enabled=False):
        leaves = [made[id(weight)] for weight in direct]
        found: tuple[Tensor, ...] = torch.autograd.grad(product.run(made_of), leaves, cotangent)
        return found


def _plain(t: Tensor) -> Tensor:
    """As the plain model has it: written out, and laid out as torch does."""
    if isinstance(t, Table):
        return t.detach().contiguous()
    return t.write_out() if isinstance(t, OneHot) else t


def _direct(product: Product, t: Tensor) -> bool:
    """Whether it is a weight whose gradient goes to a parameter as it is."""
    if isinstance(t, OneHot) or t is product.other or not t.requires_grad:
        return False
    return _leaf(t) is not None


def _leaf(t: Tensor) -> Tensor | None:
    """The parameter that it is, or is a view of."""
    if t.is_leaf:
        return t
    base = t._base
    if base is None or not base.is_leaf or not base.is_contiguous() or base.dtype != t.dtype:
        return None
    repeats = any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))
    return None if repeats else base


def _place(total: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """Of a tensor of the shape of `leaf`, what `weight` is of the leaf."""
    if weight is leaf:
        return total
    start = weight.storage_offset() - leaf.storage_offset()
    return total.as_strided(weight.shape, weight.stride(), start)
