"""Check whether tensors are equal: bit for bit, except for signs of zeros, or within rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hotrow.errors import HotrowError

Verdict = Literal["bitwise", "zeros", "rounding", "unsure", "different"]

# A function that maps (m, 2) positions to (m,) float64 bounds. Each bound is the largest possible
# difference between two correct results at that position, or inf if a difference that large could
# hide an error.
Bound = Callable[[Tensor], Tensor]

_CHUNK = 1 << 22  # compare this many values at a time, to keep temporaries small
_NAN_ULP = torch.iinfo(torch.int64).max  # the ulp distance between a NaN and a number
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """A position where two tensors differ, and the value of each tensor there."""

    position: tuple[int, ...]
    a: float
    b: float

    def __str__(self) -> str:
        return f"{list(self.position)}: {self.a!r} against {self.b!r}"


@dataclass(frozen=True)
class Agreement:
    """The result of comparing tensors `a` and `b`.

    Attributes:
        name: what the tensors represent, such as "output".
        value_count: the number of values in each tensor.
        bitwise_count: the number of values with the same bits.
        verdict: "bitwise": all values have the same bits. "zeros": values differ only in the signs
            of zeros or the bits of NaNs. "rounding": all differing values are sums of the same
            terms in a different order, and differ by no more than the rounding bound. "unsure": the
            rounding bound is too large to tell whether the tensors are equal. "different": anything
            else.
        max_ulp: the largest distance in ulp (units in the last place; adjacent floats are 1 ulp
            apart); 2**63 - 1 if a value is NaN in only one tensor.
        max_error: the largest absolute difference; inf if a value is NaN in only one tensor.
        first_difference: the first position where the tensors differ or, if the verdict is
            "different", where they differ by more than the bound.
    """

    name: str
    value_count: int
    bitwise_count: int
    verdict: Verdict
    max_ulp: int
    max_error: float
    first_difference: Difference | None

    @property
    def equal(self) -> bool:
        """Return whether the tensors are equal, up to the signs of zeros and rounding."""
        return self.verdict in ("bitwise", "zeros", "rounding")

    def __str__(self) -> str:
        count = f"{self.bitwise_count:,} of {self.value_count:,} values bit for bit"
        if self.verdict == "bitwise":
            return f"equal, {count}"
        size = f"max {self._ulp_text()} ulp, max error {self.max_error:.3g}"
        if self.verdict == "zeros":
            first = self.first_difference
            return f"equal, {count}; the others are zeros of opposite sign, first at {first}"
        if self.verdict == "unsure":
            return (
                f"inconclusive, {count}; rounding in this dtype could hide an error ({size}); use "
                "a wider dtype"
            )
        if self.verdict == "rounding":
            return (
                f"equal within rounding, {count}; the others are sums in a different order "
                f"({size}; first at {self.first_difference})"
            )
        return f"NOT equal, {count}; {size}; first difference at {self.first_difference}"

    def _ulp_text(self) -> str:
        return "NaN" if self.max_ulp == _NAN_ULP else f"{self.max_ulp:,}"

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON, with infinities as strings."""
        first = self.first_difference and {
            "position": list(self.first_difference.position),
            "a": json_number(self.first_difference.a),
            "b": json_number(self.first_difference.b),
        }
        return {
            "equal": self.equal,
            "verdict": self.verdict,
            "values": self.value_count,
            "bitwise": self.bitwise_count,
            "max_ulp": None if self.max_ulp == _NAN_ULP else self.max_ulp,
            "max_error": json_number(self.max_error),
            "first_difference": first,
        }


def json_number(value: float) -> float | str:
    """Return the number itself, or a string if JSON can't represent the number."""
    return value if abs(value) < float("inf") else str(value)


def compare_tensors(name: str, a: Tensor, b: Tensor, bound: Bound | None = None) -> Agreement:
    """Compare two tensors of the same shape and dtype.

    Args:
        name: what the tensors represent, for the report and error messages.
        a: a (..., D) tensor of any floating-point dtype.
        b: a tensor of the same shape, dtype and device.
        bound: a function that maps (m, 2) positions in the tensors, viewed as (rows, D), to (m,)
            float64 bounds: the largest difference that rounding can cause at each position. With
            None, no difference is allowed.

    Cost: one pass over both tensors, with temporaries of a few million values.
    """
    for property_name, property_a, property_b in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
    ):
        if property_a != property_b:
            raise HotrowError(
                f"{name}: cannot compare {property_name} {property_a} with {property_b}",
                fix=f"give both sides the same {property_name}",
            )
    columns = a.shape[-1] if a.ndim else 1
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    differing_count = max_ulp = 0
    max_error = 0.0
    same_numbers, undecided = True, False
    first: Difference | None = None
    first_exceeding: Difference | None = None
    for start in range(0, len(flat_a), _CHUNK):
        x, y = flat_a[start : start + _CHUNK], flat_b[start : start + _CHUNK]
        bits = _BITS[x.element_size()]
        differing = (x.view(bits) != y.view(bits)).nonzero().flatten()
        if len(differing) == 0:
            continue
        differing_count += len(differing)
        x, y = x[differing], y[differing]
        error, ulp = _measure_errors(x, y)
        max_error = max(max_error, float(error.max()))
        max_ulp = max(max_ulp, int(ulp.max()))
        same_numbers &= not bool(error.any())
        index = differing + start
        allowed: Tensor | float = 0.0
        if bound is not None and columns:
            allowed = bound(torch.stack([index // columns, index % columns], -1))
        # Rounding alone never produces NaN or infinity, so an infinite error exceeds every bound.
        exceeding = ((error > allowed) | error.isinf()).nonzero().flatten()
        undecided |= isinstance(allowed, Tensor) and bool((allowed.isinf() & (error > 0)).any())
        first = first or _difference_at(a, index, x, y, 0)
        if len(exceeding) and first_exceeding is None:
            first_exceeding = _difference_at(a, index, x, y, int(exceeding[0]))
    verdict: Verdict = "rounding"
    if first is None:
        verdict = "bitwise"
    elif first_exceeding is not None:
        verdict = "different"
    elif same_numbers:
        verdict = "zeros"
    elif undecided:
        verdict = "unsure"
    return Agreement(
        name,
        len(flat_a),
        len(flat_a) - differing_count,
        verdict,
        max_ulp,
        max_error,
        first_exceeding or first,
    )


def _measure_errors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return |x - y| in float64, and the distance in ulp; two NaNs count as equal."""
    nan_x, nan_y = x.isnan(), y.isnan()
    error = (x.double() - y.double()).abs()
    error = torch.where(error.isnan() | (nan_x != nan_y), torch.inf, error)
    error = torch.where((nan_x & nan_y) | (x == y), 0.0, error)
    rank_x, rank_y = _float_rank(x), _float_rank(y)
    # The distance between float64 ranks of opposite sign can overflow int64.
    overflows = ((rank_x >> 1) - (rank_y >> 1)).abs() >= 1 << 61
    ulp = torch.where(overflows, _NAN_ULP - 1, (rank_x - rank_y).abs())
    ulp = torch.where(nan_x != nan_y, _NAN_ULP, ulp)
    ulp = torch.where(nan_x & nan_y, 0, ulp)
    # With `torch.set_flush_denormal(True)`, the smallest numbers count as zeros above.
    smallest = torch.finfo(torch.float64).tiny
    return torch.where((error == 0) & (ulp > 0), smallest, error), ulp


def _float_rank(x: Tensor) -> Tensor:
    """Return the rank of each float among all floats of its dtype; both zeros have rank 0."""
    bits = x.view(_BITS[x.element_size()]).long()
    lowest = torch.iinfo(_BITS[x.element_size()]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _difference_at(tensor: Tensor, index: Tensor, x: Tensor, y: Tensor, i: int) -> Difference:
    position = torch.unravel_index(index[i].cpu(), tensor.shape) if tensor.ndim else ()
    return Difference(tuple(int(n) for n in position), float(x[i]), float(y[i]))
