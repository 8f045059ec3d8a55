"""Run two layers on the same ids and compare their outputs and gradients."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_ids
from hotrow.inputs.tables import check_table
from hotrow.layers import OneHotLinear
from hotrow.verify.agreement import Agreement, Bound, compare_tensors
from hotrow.verify.bounds import operation_bounds, rounding_bounds
from hotrow.verify.sides import (
    LAYERS,
    Batch,
    OperationSides,
    Side,
    check_operation_name,
    make_operation_sides,
    make_side,
)

# The largest integer in the output's gradient. With these values, the terms of a row's gradient add
# up exactly even if the row is used a few dozen times in bfloat16, a thousand times in float16, or
# 16,000 times in float32.
_LARGEST_COTANGENT = {
    torch.float64: 1 << 20,
    torch.float32: 1 << 10,
    torch.float16: 8,
    torch.bfloat16: 8,
}
# With at least this many different rows of magnitudes, terms of random signs rarely add up to 0 in
# all columns. Random signs keep the sums small, so they add up exactly more often.
_ENOUGH_SUMS = 1000


@dataclass(frozen=True)
class Check:
    """The result of `check`. It is truthy if the two sides are equal, and prints as a short report.

    Attributes:
        a: the name of the first side.
        b: the name of the second side.
        agreements: one `Agreement` for the output and one for each gradient.
        notes: the cause of a difference, if it is known.
    """

    a: str
    b: str
    agreements: tuple[Agreement, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether the output and all gradients are equal."""
        return all(agreement.equal for agreement in self.agreements)

    @property
    def _verdict(self) -> str:
        if self.equal:
            return "equal"
        different = any(agreement.verdict == "different" for agreement in self.agreements)
        return "NOT equal" if different else "inconclusive"

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        width = max(len(agreement.name) for agreement in self.agreements)
        lines = [f"{agreement.name:<{width}}  {agreement}" for agreement in self.agreements]
        return "\n".join([f"{self.a} and {self.b}: {self._verdict}", *lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row">{html.escape(agreement.name)}</th>'
            f"<td>{html.escape(str(agreement))}</td></tr>"
            for agreement in self.agreements
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = html.escape(f"{self.a} and {self.b}: {self._verdict}")
        return f"<table><caption>{caption}</caption>{rows}</table>{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON."""
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
    b: nn.Module | Tensor | str,
    ids: Any,
    *,
    offsets: Any = None,
    per_sample_weights: Tensor | None = None,
    seed: int = 0,
) -> Check:
    """Run two layers on the same ids and check that their outputs and gradients are equal.

    Each side is one of these:

    - a (V, D) tensor: a table, multiplied by the dense one-hot
    - `nn.Linear`: the layer applied to the dense one-hot, or to the multi-hot for bags
    - `nn.Embedding`, `nn.EmbeddingBag` or `hotrow.OneHotLinear`: the layer applied to the ids

    If `a` is a table, `b` may also be the name of an operation on the one-hot of the ids. In that
    case, one side uses the dense one-hot, and the other side uses hotrow's one-hot, which stores
    only the ids:

    - "lookup": one-hot @ table
    - "gather": (one-hot * scores).sum(1), with random scores
    - "scatter": one-hot.T @ rows, with a random row for each id
    - "count": one-hot.sum(0), in the table's dtype

    The gradients are those of sum(output * c), where c contains random nonzero integers. They are
    computed even for a weight that doesn't require grad, and without the hooks of the weight.
    Integers add up exactly in any order, so the two gradients must be bitwise equal, even if a
    float32 row is used a thousand times. The weight gradient of a linear layer is transposed, so
    that both gradients are V x D.

    Two values are equal if they have the same bits, or differ only in the sign of a zero. Sums of
    rows also count as equal if rounding explains their difference. This applies to the output of a
    bag or scatter, and to the gradient of a weighted or mean bag. Sums of k terms x in two
    different orders differ by at most 2 (k - 1) u sum|x|, where u is the dtype's unit roundoff.
    This bound applies only if the rows of both sides are bitwise equal. If the bound is large
    enough to hide an error, the result is inconclusive, which counts as not equal. This happens,
    for example, if a bfloat16 bag has dozens of ids.

    Args:
        a: the first side.
        b: the second side, or the name of an operation.
        ids: an int64 or int32 tensor or a list. The shape is (...,); for bags, (B, L), or (N,) with
            offsets.
        offsets: (B,), the start of each bag.
        per_sample_weights: a floating-point tensor of the same shape as the ids; only for "sum"
            bags. The gradient of the weights is compared too.
        seed: the seed for c.

    Returns:
        A `Check`. It is truthy if the sides are equal, and prints as a report.

    Raises:
        HotrowError: a side has an unsupported type, the operation is unknown, the sides differ in
            shape, dtype or device, or `Embedding` would reject the ids.

    Cost: the forward and backward passes of both sides, each with a V x D gradient, plus the dense
    one-hot for tables and linear layers. The layers and their gradients don't change.

    >>> table = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
    >>> check(table, torch.nn.Embedding.from_pretrained(table), [2, 0, 2])
    one-hot @ table and Embedding(3, 2): equal
    output    equal, 6 of 6 values bit for bit
    gradient  equal, 6 of 6 values bit for bit
    >>> check(table, "scatter", [2, 0, 2])
    one-hot.T @ rows and scatter: equal
    output            equal, 6 of 6 values bit for bit
    gradient of rows  equal, 6 of 6 values bit for bit

    Source: C.-P. Jeannerod and S. M. Rump (2013) for the bound; see `hotrow/verify/bounds.py`.
    """
    _refuse_models(a, b, ids)
    batch = Batch.of(a, b, ids, offsets, per_sample_weights)
    if isinstance(b, str):
        return _check_operation(b, a, batch, seed)
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


def _refuse_models(a: Any, b: Any, ids: Any) -> None:
    """Raise `HotrowError` if the arguments are whole models, or the arguments of a model."""
    fix = (
        "to compare a model before and after convert, run hotrow compare MODEL --inputs BATCH, "
        "such as hotrow compare models:build --inputs models:batch, where build returns the model "
        "and batch returns its arguments"
    )
    for side in (a, b):
        if isinstance(side, nn.Module) and not isinstance(side, LAYERS):
            names = ", ".join(each.__name__ for each in (*LAYERS, OneHotLinear))
            raise HotrowError(
                f"check cannot compare a {type(side).__name__}, only a table or one of the layers "
                f"{names}",
                fix=fix,
            )
    parts = ids.values() if isinstance(ids, dict) else ids if isinstance(ids, tuple | list) else ()
    if any(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
        raise HotrowError(
            f"ids is a {type(ids).__name__} of tensors, but the ids of a layer must be one tensor",
            fix=f"pass one of them; {fix}",
        )


def _check_operation(name: str, table: Any, batch: Batch, seed: int) -> Check:
    """Compare the dense version of a one-hot operation with hotrow's version; see `check`."""
    check_operation_name(name)
    if not isinstance(table, Tensor):
        raise HotrowError(
            f"the first side is a {type(table).__name__}, but {name!r} needs a (V, D) tensor",
            fix=f"pass the weight: check(layer.weight, {name!r}, ids)",
        )
    table = check_table(table, "the table").detach()
    batch = Batch(check_ids(batch.ids, len(table)).reshape(-1))
    sides = make_operation_sides(name, table, batch, seed)
    cotangent = draw_integers(sides.shape, table, seed)
    return compare_operation(
        batch,
        sides,
        sides.literal.compute_results(cotangent),
        sides.by_ids.compute_results(cotangent),
        cotangent,
    )


def draw_cotangent(side: Side, batch: Batch, seed: int) -> Tensor:
    """Draw a random gradient for the output of `side`; see `draw_integers`."""
    shape = batch.ids.shape if batch.offsets is None else batch.offsets.shape
    weight = side.tensors["weight"]
    columns = weight.shape[0] if side.transposed else weight.shape[1]
    return draw_integers((*shape, columns), weight, seed)


def draw_integers(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """Draw random nonzero integers with the dtype and device of `like`.

    Integers add up exactly in any order as long as the dtype can represent the sum. So a gradient
    that differs in any bit is wrong, no matter how often a row is used. The integers are drawn on
    the CPU, so that all devices get the same numbers.

    With few columns and a small dtype, the terms of a row could add up to 0 in all columns, which
    would hide a wrong factor. So the integers of a column then have the same sign.
    """
    largest = _LARGEST_COTANGENT[like.dtype]
    sign_shape = shape[-1:] if largest ** shape[-1] < _ENOUGH_SUMS else shape
    return signed_integers(shape, sign_shape, largest, seed).to(like)


def signed_integers(
    shape: tuple[int, ...], sign_shape: tuple[int, ...], largest: int, seed: int
) -> Tensor:
    """Draw integers from -largest to largest, without 0; `sign_shape` broadcasts to `shape`."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(1, largest + 1, shape, generator=generator, device="cpu")
    signs = 2 * torch.randint(0, 2, sign_shape, generator=generator, device="cpu") - 1
    return magnitudes * signs


def compare_operation(
    batch: Batch,
    sides: OperationSides,
    literal: dict[str, Tensor],
    by_ids: dict[str, Tensor],
    cotangent: Tensor,
) -> Check:
    """Compare the results of the two sides of an operation; see `check`."""
    if sides.by_ids.name == "lookup":
        return compare_results(sides.literal, literal, sides.by_ids, by_ids, batch, cotangent)
    bounds = operation_bounds(sides.by_ids, batch.ids, sides.dtype)
    return _compare(sides.literal, literal, sides.by_ids, by_ids, bounds)


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
                f"{one.name} has a bias but {other.name} has none, so they train differently",
                fix="use a bias on both sides (OneHotLinear supports it) or on neither",
            )
    bounds = rounding_bounds(b, batch, cotangent) if _have_same_terms(a, b, batch) else {}
    return _compare(a, results_a, b, results_b, bounds)


def _compare(
    a: Side,
    results_a: dict[str, Tensor],
    b: Side,
    results_b: dict[str, Tensor],
    bounds: dict[str, Bound],
) -> Check:
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
    """Return whether the rows for these ids and the biases are bitwise equal on both sides."""
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
    """Return a note if non-finite values in a table can explain the difference."""
    for each in (a, b):
        if "weight" not in each.tensors:
            continue
        table = each.tensors["weight"].detach()
        rows = (~table.isfinite()).any(0 if each.transposed else 1).nonzero().flatten()
        if len(rows):
            others = f" and {len(rows) - 1:,} more contain" if len(rows) > 1 else " contains"
            return (
                f"row {int(rows[0])} of the table{others} inf or NaN. 0 x inf is NaN, so a "
                "matmul spreads NaN to every output; a lookup reads only the selected rows",
            )
    return ()
