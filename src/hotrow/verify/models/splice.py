"""Run a converted model with its lookups and sums of rows replaced by dense products.

With the dense products, the rest of the model computes the same bits as the plain model. Only the
lookups and the sums of rows by id can differ, and each of them is compared with its product on the
same inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hotrow.onehot.parts import DenseColumns, Field, Part, flatten, unflatten
from hotrow.onehot.tensor import OneHot
from hotrow.table.metadata import METADATA_FUNCTIONS
from hotrow.table.nested import find_instances
from hotrow.table.parameter import Table
from hotrow.verify.agreement import Agreement, Bound, compare_tensors
from hotrow.verify.models.products import Product, ProductMode, TensorMap


class ProductSplice(ProductMode):
    """Compares each lookup with its dense product, and lets the model continue with the product.

    Other products of a one-hot with a dense tensor, such as the sum of rows by id `x.T @ rows`, are
    also compared and replaced. Their gradients come from the dense product.

    If a looked-up weight is a parameter or a view of a parameter, its gradient comes from the
    lookup. All other gradients come from the product. After the backward pass, `finish` compares
    the gradients of lookups and products, and `gradient_bound` bounds the rounding errors in the
    weights' gradients.

    Attributes:
        agreements: one `Agreement` for each result of each product.
        epsilon: the largest eps among the dtypes that the products use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.agreements: list[Agreement] = []
        self.epsilon = 0.0
        self._result_gradients: list[tuple[Product, Tensor]] = []
        self._used_elsewhere: set[int] = set()
        self._weight_sums: dict[int, tuple[Tensor, Tensor, bool, torch.dtype]] = {}
        self._references: list[Any] = []  # keeps tensors alive while their id() is used as a key

    def on_other_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the parameters that operations other than lookups use."""
        if func not in METADATA_FUNCTIONS:
            self._used_elsewhere.update(map(id, find_instances((args, kwargs), nn.Parameter)))

    def on_lookup(self, product: Product, result: Tensor) -> Tensor:
        """Compare the lookup with the product, and return the product."""
        dense = self._compare_results(product, result)
        if not result.requires_grad:
            return dense
        dense = product.run(
            lambda t: _to_plain(t).detach() if _is_parameter_weight(product, t) else _to_plain(t)
        )
        lookup_axis = product.run(lambda t: t if _is_parameter_weight(product, t) else t.detach())
        spliced: Tensor = _SplicedGradient.apply(self, product, dense, lookup_axis)  # type: ignore[no-untyped-call]
        return spliced

    def on_contraction(self, product: Product, result: Tensor) -> Tensor:
        """Compare the result from the ids with the dense product, and return the product."""
        dense = self._compare_results(product, result)
        if not result.requires_grad:
            return dense
        dense = product.run(_to_plain)
        dense.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self.record_gradient(product, gradient.clone())
        )
        return dense

    def _compare_results(self, product: Product, result: Tensor) -> Tensor:
        """Compare the result from the ids with the dense product, and return the product."""
        with torch.no_grad():
            dense = product.run(lambda t: _to_plain(t).detach())
        bound = self._result_bound(product, dense) if dense.is_floating_point() else None
        if dense.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(_coarsest_dtype(product, dense)).eps)
        self.agreements.append(compare_any_tensors(f"{product.name}", result, dense, bound))
        return dense

    def record_gradient(self, product: Product, gradient: Tensor) -> None:
        """Record the gradient of a product's result."""
        self._result_gradients.append((product, gradient))

    def finish(self) -> None:
        """Compare the gradients of each lookup with those of its product."""
        with torch.enable_grad():
            for product, gradient in self._result_gradients:
                self._add_weight_terms(product, gradient)
                self._compare_input_gradients(product, gradient)
        self._result_gradients.clear()

    def _result_bound(self, product: Product, result: Tensor) -> Bound:
        """Bound how much the result can change if its terms are added in another order."""
        with torch.no_grad():
            magnitudes = _run_in_float64(product, _magnitudes)
            terms = _run_in_float64(product, _count_terms)
        return _rounding_bound(
            terms, magnitudes, _rounds_terms(product), _coarsest_dtype(product, result)
        )

    def _add_weight_terms(self, product: Product, gradient: Tensor) -> None:
        """Add up the term counts and magnitudes of the weight gradients for each parameter."""
        direct = [weight for weight in product.weights if _is_parameter_weight(product, weight)]
        if not direct:
            return
        magnitudes, terms = (
            _weight_gradients(product, direct, transform(gradient), transform)
            for transform in (_magnitudes, _count_terms)
        )
        for weight, weight_magnitudes, weight_terms in zip(direct, magnitudes, terms, strict=True):
            leaf = _parameter_of(weight)
            assert leaf is not None
            if id(leaf) not in self._weight_sums:
                zeros = torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device)
                self._weight_sums[id(leaf)] = zeros, zeros.clone(), False, leaf.dtype
                self._references.append(leaf)
            all_terms, all_magnitudes, rounds_terms, previous_dtype = self._weight_sums[id(leaf)]
            for total, added in ((all_terms, weight_terms), (all_magnitudes, weight_magnitudes)):
                _view_as_weight(total, leaf, weight).add_(added)
            dtype = max(
                previous_dtype,
                _coarsest_dtype(product, gradient),
                key=lambda each: torch.finfo(each).eps,
            )
            rounds_terms |= _rounds_terms(product)
            self._weight_sums[id(leaf)] = all_terms, all_magnitudes, rounds_terms, dtype

    def gradient_bound(self, parameter: Tensor, gradient: Tensor) -> Bound | None:
        """Bound a gradient's rounding error, or return None if no lookup uses `parameter`."""
        if id(parameter) not in self._weight_sums:
            return None
        terms, magnitudes, rounds_terms, dtype = self._weight_sums[id(parameter)]
        if id(parameter) in self._used_elsewhere:  # other uses add a term of unknown magnitude
            terms, magnitudes = terms + 1, 2 * magnitudes + gradient.double().abs()
        return _rounding_bound(terms, magnitudes, rounds_terms, dtype)

    def _compare_input_gradients(self, product: Product, gradient: Tensor) -> None:
        """Compare the gradients of the product's inputs, except for parameters."""
        tensors, layout = flatten(product.x.parts)
        part_tensors = [t for t in tensors if t.requires_grad]
        other_tensors = [t for t in (product.other_input, *product.weights) if t is not None]
        other_tensors = [
            t for t in other_tensors if t.requires_grad and not _is_parameter_weight(product, t)
        ]
        leaves = [*part_tensors, *other_tensors]
        if not leaves:
            return

        def compute_gradients(
            transform: TensorMap, cotangent: Tensor, dtype: torch.dtype | None, dense: bool
        ) -> Any:
            replaced = {id(t): transform(t.detach()).requires_grad_() for t in leaves}

            def replace(t: Tensor) -> Any:
                if id(t) in replaced:
                    return replaced[id(t)]
                return transform(t.detach()) if t.is_floating_point() else t

            parts = unflatten(map(replace, tensors), layout)
            x = OneHot(parts, dtype or product.x.cached_dtype, layout=product.x.axis_layout)
            result = product.with_scales(transform).run(
                lambda t: (x.materialize() if dense else x) if t is product.x else replace(t)
            )
            return torch.autograd.grad(result, list(replaced.values()), cotangent)

        def clone(t: Tensor) -> Tensor:
            return t.clone()

        device = gradient.device.type
        with torch.autocast(
            device, dtype=product.autocast_dtype, enabled=product.autocast_dtype is not None
        ):
            lookup_gradients = compute_gradients(clone, gradient, None, dense=False)
            product_gradients = compute_gradients(clone, gradient, None, dense=True)
        with torch.autocast(device, enabled=False):
            magnitudes, terms = (
                compute_gradients(transform, transform(gradient), torch.float64, dense=True)
                for transform in (_magnitudes, _count_terms)
            )
        dtype = _coarsest_dtype(product, gradient)
        for found, product_gradient, count, size in zip(
            lookup_gradients, product_gradients, terms, magnitudes, strict=True
        ):
            what = f"gradient through {product.name}"
            self.agreements.append(
                compare_any_tensors(
                    what, found, product_gradient, _rounding_bound(count, size, True, dtype)
                )
            )


class _SplicedGradient(torch.autograd.Function):
    """Return the product's values, and pass the gradient to both the product and the lookup."""

    @staticmethod
    def forward(
        ctx: Any, splice: ProductSplice, product: Product, dense: Tensor, found: Tensor
    ) -> Tensor:
        ctx.saved = splice, product
        return dense.clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, Tensor]:
        splice, product = ctx.saved
        splice.record_gradient(product, gradient.detach().clone())
        return None, None, gradient, gradient


def compare_any_tensors(what: str, a: Tensor, b: Tensor, bound: Bound | None = None) -> Agreement:
    """Compare like `compare_tensors`, but accept complex tensors and unequal shapes or dtypes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return Agreement(what, max(a.numel(), b.numel()), 0, "different", 0, float("inf"), None)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return compare_tensors(what, a.contiguous(), b.contiguous(), bound)


def _elementwise_bound(values: Tensor) -> Bound:
    """Return a `Bound` that looks up each position in `values`."""
    columns = values.shape[-1] if values.ndim else 1
    by_row = values.reshape(-1, max(columns, 1))
    return lambda places: by_row[places[:, 0], places[:, 1]]


def _rounding_bound(
    terms: Tensor, magnitudes: Tensor, rounds_terms: bool, dtype: torch.dtype
) -> Bound:
    """Bound the rounding of sums, given term counts and total magnitudes; see `verify/bounds.py`.

    The bound counts an extra rounding if each term is a rounded product, or in half precision,
    where some libraries round twice.
    """
    info = torch.finfo(dtype)
    roundings = (terms + 1 if rounds_terms or info.bits < 32 else terms - 1).clamp(min=0)
    allowed = 2 * roundings * (info.eps / 2 * magnitudes + info.smallest_normal * info.eps)
    allowed = torch.where(magnitudes == 0, 0.0, allowed)
    return _elementwise_bound(
        torch.where((allowed >= magnitudes / 8) & (allowed > 0), torch.inf, allowed)
    )


def _coarsest_dtype(product: Product, result: Tensor) -> torch.dtype:
    """Return the least precise dtype of the product's tensors."""
    dtypes = {result.dtype, *(weight.dtype for weight in product.weights)}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _rounds_terms(product: Product) -> bool:
    """Return whether terms are rounded before they are added; terms with factor 1 are exact."""
    if product.other_input is not None or product.is_scaled:
        return True
    return any(isinstance(p, DenseColumns) or p.weights is not None for p in product.x.parts)


def _run_in_float64(product: Product, transform: TensorMap) -> Tensor:
    with torch.autocast(product.x.cached_device.type, enabled=False):
        return product.with_scales(transform).run(transform)


def _weight_gradients(
    product: Product, direct: list[Tensor], cotangent: Tensor, transform: TensorMap
) -> tuple[Tensor, ...]:
    """Return the gradients of the weights in `direct`, with `transform` applied to all tensors."""
    replaced = {id(weight): transform(weight).requires_grad_() for weight in direct}

    def replace(t: Tensor) -> Any:
        return replaced[id(t)] if id(t) in replaced else transform(t)

    with torch.autocast(cotangent.device.type, enabled=False):
        compute_gradients = [replaced[id(weight)] for weight in direct]
        found: tuple[Tensor, ...] = torch.autograd.grad(
            product.with_scales(transform).run(replace), compute_gradients, cotangent
        )
        return found


def _magnitudes(t: Tensor) -> Tensor:
    """Return the sum of the magnitudes of the terms in each entry."""
    return _sum_terms(t, lambda values: values.double().abs())


def _count_terms(t: Tensor) -> Tensor:
    """Return the number of terms in each entry: of the ids that select it, or 1, or 0 for a 0."""
    return _sum_terms(t, lambda values: (values != 0).double())


def _sum_terms(t: Tensor, transform: TensorMap) -> Tensor:
    """Return the dense tensor, with `transform` applied to the terms before their sum.

    Several ids of a row may select the same entry. A lookup adds the row of each of them.
    """
    if not isinstance(t, OneHot) or t.fill != 0:
        result: Tensor = transform(_to_plain(t).detach())
        return result
    parts: list[Part] = []
    for part in t.parts:
        if isinstance(part, DenseColumns):
            parts.append(DenseColumns(transform(part.to_dense(t.cached_dtype).detach())))
        else:
            weights = None if part.weights is None else transform(part.weights.detach())
            parts.append(Field(part.ids, weights, part.width))
    return OneHot(parts, torch.float64, layout=t.axis_layout).materialize()


def _to_plain(t: Tensor) -> Tensor:
    """Return the dense, contiguous tensor that the plain model uses."""
    if isinstance(t, Table):
        return t.detach().contiguous()
    return t.materialize() if isinstance(t, OneHot) else t


def _is_parameter_weight(product: Product, t: Tensor) -> bool:
    """Return whether `t` is a weight whose gradient flows to a parameter unchanged."""
    if not product.is_lookup or isinstance(t, OneHot) or not t.requires_grad:
        return False
    if t is product.other_input:
        return False
    return _parameter_of(t) is not None


def _parameter_of(t: Tensor) -> Tensor | None:
    """Return `t` if it is a parameter, or the parameter that it views; otherwise None."""
    if t.is_leaf:
        return t
    base = t._base
    if base is None or not base.is_leaf or not base.is_contiguous() or base.dtype != t.dtype:
        return None
    repeats = any(step == 0 and size > 1 for step, size in zip(t.stride(), t.shape, strict=True))
    return None if repeats else base


def _view_as_weight(total: Tensor, leaf: Tensor, weight: Tensor) -> Tensor:
    """View `total`, which has the shape of `leaf`, the same way that `weight` views `leaf`."""
    if weight is leaf:
        return total
    start = weight.storage_offset() - leaf.storage_offset()
    return total.as_strided(weight.shape, weight.stride(), start)
