"""How far two tensors agree: bit for bit, but for the sign of zeros, within rounding, or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hotrow.errors import HotrowError

Verdict = Literal["bitwise", "zeros", "rounding", "unsure", "different"]

# (m, 2) positions -> (m,) float64: how far apart two correct results may be there; inf where
# the bound is too large to decide anything.
Bound = Callable[[Tensor], Tensor]

_CHUNK = 1 << 22  # values compared at a time, to keep the temporaries small
_NAN_ULP = torch.iinfo(torch.int64).max  # the ulp distance to a NaN
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One place where two tensors differ."""

    position: tuple[int, ...]
    a: float
    b: float

    def __str__(self) -> str:
        return f"{list(self.position)}: {self.a!r} against {self.b!r}"


@dataclass(frozen=True)
class Agreement:
    """How far tensors `a` and `b` agree.

    Attributes:
        name: of the two, such as "output".
        value_count: the number of values in each.
        bitwise_count: how many of them have the same bits.
        verdict: "bitwise", all have; "zeros", the rest are 0.0 against -0.0 (or two NaN);
            "rounding", the rest are sums of the same terms in another order, and within what
            that can change; "unsure", that could change so much that nothing follows;
            "different", otherwise.
        max_ulp: the largest distance in units in the last place (floats of the dtype between
            the two, plus one); 2**63 - 1 if one of the two is NaN.
        max_error: the largest absolute difference; inf if one of the two is NaN.
        first_difference: the first place where they differ; for "different", by too much.
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
        """Whether the two are the same numbers, as far as arithmetic can tell."""
        return self.verdict in ("bitwise", "zeros", "rounding")

    def __str__(self) -> str:
        count = f"{self.bitwise_count:,} of {self.value_count:,} values bit for bit"
        if self.verdict == "bitwise":
            return f"equal, {count}"
        size = f"max {self._ulp_text()} ulp, max error {self.max_error:.3g}"
        if self.verdict == "zeros":
            first = self.first_difference
            return f"equal, {count}, the rest but for the sign of a zero; first at {first}"
        if self.verdict == "unsure":
            return (
                f"CANNOT TELL, {count}; so many terms are added that rounding in this dtype hides "
                f"any fault ({size}); check in a wider dtype"
            )
        if self.verdict == "rounding":
            return (
                f"equal within rounding, {count}, the rest sums added in another order "
                f"({size}; first at {self.first_difference})"
            )
        return f"NOT equal, {count}; {size}; first difference at {self.first_difference}"

    def _ulp_text(self) -> str:
        return "NaN" if self.max_ulp == _NAN_ULP else f"{self.max_ulp:,}"

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON, which has no infinity: a string stands for it."""
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
    """The number, or its name where JSON has none."""
    return value if abs(value) < float("inf") else str(value)


def compare_tensors(name: str, a: Tensor, b: Tensor, bound: Bound | None = None) -> Agreement:
    """Compare two tensors of one shape and dtype.

    Args:
        name: what the tensors are, for the report and for errors.
        a: any floating dtype, (..., D).
        b: the same shape, dtype and device.
        bound: from positions (m, 2) in the tensors seen as (rows, D) to the difference that
            rounding can make there, (m,) float64. None: none.

    Cost: one pass, with temporaries of a few million values.
    """
    for property_name, property_a, property_b in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
    ):
        if property_a != property_b:
            raise HotrowError(
                f"{name}: {property_name} {property_a} against {property_b}, "
                "so there is no comparing"
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
        # Rounding alone makes no NaN or infinity, whatever the bound says.
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
    """|x - y| in float64 and the distance in ulp: 0 between two NaN, infinite to one."""
    nan_x, nan_y = x.isnan(), y.isnan()
    error = (x.double() - y.double()).abs()
    error = torch.where(error.isnan() | (nan_x != nan_y), torch.inf, error)
    error = torch.where((nan_x & nan_y) | (x == y), 0.0, error)
    rank_x, rank_y = _float_rank(x), _float_rank(y)
    # float64 ranks of opposite sign can be further apart than int64 can hold.
    overflows = ((rank_x >> 1) - (rank_y >> 1)).abs() >= 1 << 61
    ulp = torch.where(overflows, _NAN_ULP - 1, (rank_x - rank_y).abs())
    ulp = torch.where(nan_x != nan_y, _NAN_ULP, ulp)
    return error, torch.where(nan_x & nan_y, 0, ulp)


def _float_rank(x: Tensor) -> Tensor:
    """The rank of each float among all floats of its dtype; both zeros have rank 0."""
    bits = x.view(_BITS[x.element_size()]).long()
    lowest = torch.iinfo(_BITS[x.element_size()]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _difference_at(tensor: Tensor, index: Tensor, x: Tensor, y: Tensor, i: int) -> Difference:
    position = torch.unravel_index(index[i].cpu(), tensor.shape) if tensor.ndim else ()
    return Difference(tuple(int(n) for n in position), float(x[i]), float(y[i]))
