"""Bound how much rounding can change a sum when its terms are added in a different order."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.verify.agreement import Bound
from hotrow.verify.sides import Batch, Side


def rounding_bounds(side: Side, batch: Batch, cotangent: Tensor) -> dict[str, Bound]:
    """For each result of `side`, return the largest difference that rounding alone can cause.

    The output is S W + b and the gradient is S.T c, where c is the cotangent. S is the (B, V)
    matrix of coefficients: ones for lookups and unweighted sums, the weights for weighted sums, and
    1 / count for means. Each sum has k terms. S determines k, and S and W (or c) determine each
    term x.

    In any order, the computed sum of k terms is within (k - 1) u sum|x| of the exact sum, where u
    is the unit roundoff. The factor (k - 1) u becomes k u if the terms are products, and
    (k + 1) u in a mean. Sums in two different orders differ by at most twice this bound. The bound
    is 0 in three cases:

    - one term, unless it is a weighted row in half precision (torch's `embedding_bag` rounds the
      product's ties away from zero)
    - two terms in float32 or float64, because a + b = b + a (in half precision, some libraries
      round a sum twice)
    - integers whose magnitudes sum to at most 1 / u, because they add up exactly in any order (all
      values of c are integers)

    A bound of sum|x| / 8 or more is large enough to hide an error, so it is replaced with inf.

    Both sides must add the same terms, so compare their tables first.

    Source: C.-P. Jeannerod and S. M. Rump, Improved error bounds for inner products in
    floating-point arithmetic, SIAM J. Matrix Anal. Appl. 34 (2013).
    """
    ids, segments = batch.ids.reshape(-1), batch.segments()
    columns = cotangent.shape[-1]
    outputs = len(ids) if batch.offsets is None else len(batch.offsets)
    outgoing = cotangent.reshape(outputs, columns).double().abs()  # (B, D)
    table = side.tensors["weight"].detach()
    rows = (table.t() if side.transposed else table)[ids].double().abs()  # (N, D)
    bag_sizes = torch.bincount(segments, minlength=outputs)  # (B,)
    scale = torch.ones(len(ids), dtype=torch.float64, device=ids.device)  # (N,)
    if batch.weights is not None:
        scale = batch.weights.double().abs()
    if batch.mode == "mean":
        scale = scale / bag_sizes[segments]
    products = batch.weights is not None or batch.mode == "mean"
    averaged = int(batch.mode == "mean")  # dividing by the count adds one rounding

    def bound(terms: Tensor, magnitudes: Tensor, products: bool, integers: bool = False) -> Tensor:
        return _largest_difference(terms, magnitudes, table.dtype, products, averaged, integers)

    def sum_by_slot(slots: Tensor, values: Tensor, length: int) -> Tensor:
        return values.new_zeros(length, columns).index_add(0, slots, values)

    # A maximum selects a row and adds nothing.
    terms = bag_sizes.clamp(max=1) if batch.mode == "max" else bag_sizes
    output = sum_by_slot(segments, rows * scale[:, None], outputs)
    touched, slots, use_counts = torch.unique(ids, return_inverse=True, return_counts=True)
    gradient = sum_by_slot(slots, outgoing[segments] * scale[:, None], len(touched))
    tables = {"gradient": bound(use_counts, gradient, products, integers=True)}
    if "bias" in side.tensors:
        terms, output = terms + 1, output + side.tensors["bias"].detach().double().abs()
        use_counts = torch.tensor([outputs], device=ids.device)
        tables["gradient of bias"] = bound(use_counts, outgoing.sum(0, keepdim=True), False, True)
    tables["output"] = bound(terms, output, products)
    if batch.weights is not None:  # each gradient is a sum of D products
        dots = (rows * outgoing[segments]).sum(-1)[None]  # (1, N)
        terms = torch.tensor([columns], device=ids.device)
        tables["gradient of per_sample_weights"] = bound(terms, dots, True)

    if len(ids) == 0:
        return dict.fromkeys(tables, _no_rounding)

    def bound_for(name: str) -> Bound:
        if name == "gradient":
            return _bound_by_id(touched, tables[name])
        return lambda positions: tables[name][positions[:, 0], positions[:, 1]]

    return {name: bound_for(name) for name in tables}


def operation_bounds(side: Side, ids: Tensor, dtype: torch.dtype) -> dict[str, Bound]:
    """Bound the rounding error of an operation on the one-hot of (N,) ids; see `OperationSides`.

    Only a scatter and a count add up terms. All other results are equal bit for bit. The bound for
    an operation's gradients is 0, because each entry has a single term.
    """
    if side.name not in ("scatter", "count") or len(ids) == 0:
        return {}
    is_count = side.name == "count"
    terms = (ids.new_ones(len(ids), 1) if is_count else side.tensors["rows"]).double().abs()
    touched, slots, use_counts = torch.unique(ids, return_inverse=True, return_counts=True)
    magnitudes = terms.new_zeros(len(touched), terms.shape[1]).index_add(0, slots, terms)
    allowed = _largest_difference(use_counts, magnitudes, dtype, integers=is_count)
    bound = _bound_by_id(touched, allowed)
    # The output of a count has shape (V,), so the last index is the class.
    return {"output": (lambda positions: bound(positions.flip(1))) if is_count else bound}


def _largest_difference(
    terms: Tensor,
    magnitudes: Tensor,
    dtype: torch.dtype,
    products: bool = False,
    averaged: int = 0,
    integers: bool = False,
) -> Tensor:
    """Map (R,) term counts and (R, D) sums of the terms' magnitudes to (R, D) bounds."""
    info = torch.finfo(dtype)
    unit, smallest = info.eps / 2, info.smallest_normal * info.eps
    roundings = (terms + averaged if products else terms - 1)[:, None]
    allowed = 2 * roundings * (unit * magnitudes + smallest)
    allowed = torch.where(allowed >= magnitudes / 8, torch.inf, allowed)
    exact_terms = 1 if averaged else 2 - int(products) - int(unit > 1e-6)
    exact = (terms <= exact_terms)[:, None]
    if integers and not products:
        exact = exact | (magnitudes <= 1 / unit)
    return torch.where(exact, 0.0, allowed)


def _bound_by_id(touched: Tensor, allowed: Tensor) -> Bound:
    """Return a `Bound` for a (V, D) result, given the (R, D) bounds of the R touched rows."""

    def bound_at(positions: Tensor) -> Tensor:
        row, column = positions.unbind(-1)
        slot = torch.searchsorted(touched, row.contiguous()).clamp(max=len(touched) - 1)
        # An untouched row has no terms, so nothing is rounded.
        return torch.where(touched[slot] == row, allowed[slot, column], 0.0)

    return bound_at


def _no_rounding(positions: Tensor) -> Tensor:
    return torch.zeros(len(positions), dtype=torch.float64, device=positions.device)
