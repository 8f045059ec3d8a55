"""Run two layers on the same ids and compare their outputs and gradients."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.verify.agreement import Agreement, compare_tensors
from hotrow.verify.bounds import rounding_bounds
from hotrow.verify.sides import Batch, Side, make_side

# The largest integer in the output's gradient: a few dozen uses of a row add up exactly in
# bfloat16, a thousand in float16, 16,000 in float32.
_LARGEST_COTANGENT = {
    torch.float64: 1 << 20,
    torch.float32: 1 << 10,
    torch.float16: 8,
    torch.bfloat16: 8,
}


@dataclass(frozen=True)
class Check:
    """The result of `check`; true if the two sides are equal, and prints as a short report.

    Attributes:
        a: the first side, in words.
        b: the second side, in words.
        agreements: one for the output and one for each gradient.
        notes: why they differ, where the cause is known.
    """

    a: str
    b: str
    agreements: tuple[Agreement, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether output and gradients are the same numbers."""
        return all(agreement.equal for agreement in self.agreements)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        width = max(len(agreement.name) for agreement in self.agreements)
        lines = [f"{agreement.name:<{width}}  {agreement}" for agreement in self.agreements]
        verdict = "equal" if self.equal else "NOT equal"
        return "\n".join([f"{self.a} and {self.b}: {verdict}", *lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        rows = "".join(
            f'<tr><th scope="row">{html.escape(agreement.name)}</th>'
            f"<td>{html.escape(str(agreement))}</td></tr>"
            for agreement in self.agreements
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = html.escape(f"{self.a} and {self.b}: {verdict}")
        return f"<table><caption>{caption}</caption>{rows}</table>{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return {
            "equal": self.equal,
            "a": self.a,
            "b": self.b,
            **{
                agreement.name.replace(" ", "_"): agreement.to_dict()
                for agreement in self.agreements
            },
            "notes": list(self.notes),
        }


def check(
    a: nn.Module | Tensor,
    b: nn.Module | Tensor,
    ids: Any,
    *,
    offsets: Any = None,
    per_sample_weights: Tensor | None = None,
    seed: int = 0,
) -> Check:
    """Run two layers on the same ids and say whether output and gradients are the same.

    Each side is one of:

        (V, D) Tensor        a table; the literal one-hot matmul with it
        nn.Linear            the layer on the ids' one-hot (on their multi-hot, for a bag)
        nn.Embedding, nn.EmbeddingBag, hotrow.OneHotLinear       the layer on the ids

    A linear layer's weight gradient is transposed, so that both are V x D. The gradient is
    that of sum(output * c) with c drawn from the integers, none of them 0: integers add up exactly
    in any order, so that even a row used a thousand times has one gradient, to the bit.

    Equal means: the same bits; or the same numbers but for the sign of a zero; or, where
    rows are added or scaled (a bag's output, and its gradient if it is weighted or a mean), no
    further apart than adding the same k terms x in another order can bring them:
    2 (k - 1) u sum|x| with u the dtype's unit roundoff. That is granted only if both sides hold
    the same rows, bit for bit. Where it says nothing (a bfloat16 bag of dozens), the verdict is
    that it cannot tell, and not that they are equal.

    Args:
        a: one side.
        b: the other.
        ids: int64 or int32, (...,); for bags (B, L), or (N,) with offsets. A list will do.
        offsets: (B,), where each bag starts.
        per_sample_weights: shaped as the ids, floating; "sum" bags only. Its gradient is
            compared too.
        seed: of c.

    Raises:
        HotrowError: a side of another type; sides whose shapes, dtypes or devices differ; ids
            as for `Embedding`.

    Cost: both sides' forward and gradient, each V x D, and the one-hot for the dense sides.
    Neither layer is changed, its gradients included.

    >>> table = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
    >>> check(table, torch.nn.Embedding.from_pretrained(table), [2, 0, 2])
    one-hot @ table and Embedding(3, 2): equal
    output    equal, 6 of 6 values bit for bit
    gradient  equal, 6 of 6 values bit for bit

    Source: C.-P. Jeannerod and S. M. Rump (2013) for the bound; see `verify/bounds.py`.
    """
    batch = Batch.of(a, b, ids, offsets, per_sample_weights)
    side_a, side_b = make_side(a, batch), make_side(b, batch)
    cotangent = draw_cotangent(side_a, batch, seed)
    return compare_results(
        side_a,
        side_a.compute_results(cotangent),
        side_b,
        side_b.compute_results(cotangent),
        batch,
        cotangent,
    )


def draw_cotangent(side: Side, batch: Batch, seed: int) -> Tensor:
    """Integers of either sign, none of them 0, shaped as the output of `side`.

    Integers add up exactly, in any order, while their sum keeps to the dtype's digits: so a
    gradient that is not the same to the bit is wrong, however often a row is used. Drawn on the
    CPU, so that every device gets the same.
    """
    shape = batch.ids.shape if batch.offsets is None else batch.offsets.shape
    generator = torch.Generator().manual_seed(seed)
    weight = side.tensors["weight"]
    columns = weight.shape[0] if side.transposed else weight.shape[1]
    largest = _LARGEST_COTANGENT[weight.dtype]
    magnitudes = torch.randint(1, largest + 1, (*shape, columns), generator=generator)
    signs = 2 * torch.randint(0, 2, (*shape, columns), generator=generator) - 1
    return (magnitudes * signs).to(weight)


def compare_results(
    a: Side,
    results_a: dict[str, Tensor],
    b: Side,
    results_b: dict[str, Tensor],
    batch: Batch,
    cotangent: Tensor,
) -> Check:
    """Compare the results of two sides; see `check`."""
    for one, other, results in ((a, b, results_b), (b, a, results_a)):
        if "bias" in one.tensors and "gradient of bias" not in results:
            raise HotrowError(
                f"{one.name} has a bias and {other.name} has none, so they train differently",
                fix="give both or neither one; OneHotLinear can have it",
            )
    bounds = rounding_bounds(b, batch, cotangent) if _have_same_terms(a, b, batch) else {}
    agreements = tuple(
        compare_tensors(
            what, _to_dense(results_a[what]), _to_dense(results_b[what]), bounds.get(what)
        )
        for what in results_a
        if what in results_b
    )
    notes = () if all(each.equal for each in agreements) else _explain_difference(a, b)
    return Check(a.name, b.name, agreements, notes)


def _have_same_terms(a: Side, b: Side, batch: Batch) -> bool:
    """Whether both have the same rows for these ids, and the same bias, bit for bit."""
    tables = [(x.tensors["weight"].t() if x.transposed else x.tensors["weight"]) for x in (a, b)]
    if tables[0].shape != tables[1].shape or tables[0].dtype != tables[1].dtype:
        return False
    rows = torch.unique(batch.ids)
    pairs = [(tables[0].detach()[rows], tables[1].detach()[rows])]
    if "bias" in a.tensors and "bias" in b.tensors:
        pairs.append((a.tensors["bias"], b.tensors["bias"]))
    return all(compare_tensors("", *pair).verdict == "bitwise" for pair in pairs)


def _to_dense(values: Tensor) -> Tensor:
    return values.to_dense() if values.is_sparse else values


def _explain_difference(a: Side, b: Side) -> tuple[str, ...]:
    """Why they differ, where the tables show it."""
    for each in (a, b):
        table = each.tensors["weight"].detach()
        rows = (~table.isfinite()).any(0 if each.transposed else 1).nonzero().flatten()
        if len(rows):
            others = f" and {len(rows) - 1:,} more rows hold" if len(rows) > 1 else " holds"
            return (
                f"row {int(rows[0])} of the table{others} inf or NaN: 0 x inf is NaN, so in a "
                "matmul it reaches every output; a lookup reads only the rows it selects",
            )
    return ()
