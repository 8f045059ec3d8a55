"""How far apart two correct orders of adding the same terms can end up."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.verify.agreement import Bound
from hotrow.verify.sides import Batch, Side


def rounding_bounds(of: Side, batch: Batch, cotangent: Tensor) -> dict[str, Bound]:
    """For each result of `of`, the largest difference that rounding alone can make.

    The output is S W + b and the gradient S.T c, with S the (B, V) coefficients: ones for
    look-ups, the weights or 1 / count in bags. So it is known how many terms x are added, k, and
    how large they are. Each order of adding k of them is within (k - 1) u sum|x| of the true sum
    (u the unit roundoff; k u where the terms are products, (k + 1) u in a mean), so two are within
    twice that. It is 0 for one term; for two in float32 and float64, since a + b = b + a (half
    precision is rounded twice by some); and for integers whose sizes sum to no more than 1 / u,
    which add up exactly in any order: such is c. Where the bound reaches an eighth of sum|x|, it
    is inf.

    It supposes that both sides add the same terms: hold their tables together first.

    Source: C.-P. Jeannerod and S. M. Rump, Improved error bounds for inner products in
    floating-point arithmetic, SIAM J. Matrix Anal. Appl. 34 (2013).
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
    averaged = int(batch.mode == "mean")  # a count is divided by: one rounding more
    info = torch.finfo(table.dtype)
    unit, smallest = info.eps / 2, info.smallest_normal * info.eps

    def bound(terms: Tensor, sizes: Tensor, products: bool, integers: bool = False) -> Tensor:
        """(R,) numbers of terms, (R, D) sums of their sizes -> (R, D)."""
        roundings = (terms + averaged if products else terms - 1)[:, None]
        allowed = 2 * roundings * (unit * sizes + smallest)
        allowed = torch.where(allowed >= sizes / 8, torch.inf, allowed)
        exact = (terms <= (2 if unit < 1e-6 and not products else 1))[:, None]
        if integers and not products:
            exact = exact | (sizes <= 1 / unit)
        return torch.where(exact, 0.0, allowed)

    def total(slots: Tensor, values: Tensor, length: int) -> Tensor:
        return values.new_zeros(length, columns).index_add(0, slots, values)

    # A maximum selects: nothing is added.
    terms = members.clamp(max=1) if batch.mode == "max" else members
    output = total(segments, rows * scale[:, None], outputs)
    touched, slots, uses = torch.unique(ids, return_inverse=True, return_counts=True)
    gradient = total(slots, outgoing[segments] * scale[:, None], len(touched))
    tables = {"gradient": bound(uses, gradient, products, integers=True)}
    if "bias" in of.tensors:
        terms, output = terms + 1, output + of.tensors["bias"].detach().double().abs()
        uses = torch.tensor([outputs], device=ids.device)
        tables["gradient of bias"] = bound(uses, outgoing.sum(0, keepdim=True), False, True)
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
