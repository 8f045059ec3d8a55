"""How far apart two correct orders of adding the same terms can end up."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow._agreement import Bound
from hotrow._sides import Batch, Side


def rounding_bounds(of: Side, batch: Batch, cotangent: Tensor) -> dict[str, Bound]:
    """For each result of `of`, the largest difference that rounding alone can make.

    The output is S W + b and the gradient S.T c, with S the (B, V) coefficients: ones for
    look-ups, the weights or 1 / count in bags. So it is known how many terms x are added, k, and
    how large they are. Each order of adding k of them is within (k - 1) u sum|x| of the true sum
    (u the unit roundoff; k + 1 where the terms are products), so two are within twice that; and
    one or two terms that are not products have the same sum in any order.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    ids, segments = batch.ids.reshape(-1), batch.segments()
    columns = cotangent.shape[-1]
    outputs = len(ids) if batch.offsets is None else len(batch.offsets)
    outgoing = cotangent.reshape(outputs, columns).double().abs()  # (B, D)
    table = of.tensors["weight"].detach()
    rows = (table.t() if of.transposed else table)[ids].double().abs()  # (N, D)
    members = torch.bincount(segments, minlength=outputs)  # (B,)
    scale = torch.ones(len(ids), dtype=torch.float64, device=ids.device)  # (N,)
    if batch.weights is not None:
        scale = batch.weights.double().abs()
    if batch.mode == "mean":
        scale = scale / members[segments]
    products = batch.weights is not None or batch.mode == "mean"
    info = torch.finfo(table.dtype)
    unit, smallest = info.eps / 2, info.smallest_normal * info.eps

    def bound(terms: Tensor, sizes: Tensor, products: bool) -> Tensor:
        """(R,) numbers of terms, (R, D) sums of their sizes -> (R, D)."""
        roundings = (terms + 1 if products else terms - 1)[:, None]
        allowed = 2 * roundings * (unit * sizes + smallest)
        return allowed if products else torch.where(terms[:, None] <= 2, 0.0, allowed)

    def total(slots: Tensor, values: Tensor, length: int) -> Tensor:
        return values.new_zeros(length, columns).index_add(0, slots, values)

    # A maximum selects: nothing is added.
    terms = members.clamp(max=1) if batch.mode == "max" else members
    output = total(segments, rows * scale[:, None], outputs)
    touched, slots, uses = torch.unique(ids, return_inverse=True, return_counts=True)
    gradient = total(slots, outgoing[segments] * scale[:, None], len(touched))
    tables = {"gradient": bound(uses, gradient, products)}
    if "bias" in of.tensors:
        terms, output = terms + 1, output + of.tensors["bias"].detach().double().abs()
        uses = torch.tensor([outputs], device=ids.device)
        tables["gradient of bias"] = bound(uses, outgoing.sum(0, keepdim=True), False)
    tables["output"] = bound(terms, output, products)
    if batch.weights is not None:  # each is a sum of D products
        dots = (rows * outgoing[segments]).sum(-1)[None]  # (1, N)
        terms = torch.tensor([columns], device=ids.device)
        tables["gradient of per_sample_weights"] = bound(terms, dots, True)

    def look_up(name: str) -> Bound:
        def at(places: Tensor) -> Tensor:
            row, column = places.unbind(-1)
            if name != "gradient":
                return tables[name][row, column]
            slot = torch.searchsorted(touched, row.contiguous()).clamp(max=len(touched) - 1)
            # In a row that is not touched there is nothing to add, and so no rounding.
            return torch.where(touched[slot] == row, tables[name][slot, column], 0.0)

        return at

    if len(ids) == 0:
        return {name: lambda places: torch.zeros(len(places)).to(outgoing) for name in tables}
    return {name: look_up(name) for name in tables}
