"""The tolerances of all tests. Each has a reason, and none is loosened to make a test pass."""

import numpy as np
import torch
from torch import Tensor


def ulp(values: Tensor, dtype: torch.dtype) -> float:
    """Return the spacing of `dtype` at the largest magnitude among `values`."""
    size = float(values.abs().max()) if values.numel() else 0.0
    return max(size * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert equal bits, for values that are only selected, or added in a fixed order."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, b = actual.detach().contiguous().view(bits), expected.detach().contiguous().view(bits)
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} values differ"


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """Assert equal values, where 0.0 equals -0.0: a sum that starts at 0.0 can't end at -0.0."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def assert_no_worse(actual: Tensor, rival: Tensor, truth: Tensor | np.ndarray) -> None:
    """Assert an error of at most the rival's error plus 2 ulp, for sums in any order.

    The truth is in float64, or in numpy's long double for float64 values. The 2 ulp, taken at the
    largest value, allow for a rival that is accurate by luck.
    """
    actual, rival = actual.detach(), rival.detach()
    if isinstance(truth, Tensor):
        assert truth.dtype == torch.float64
        truth = truth.detach().numpy()
    else:
        assert np.finfo(truth.dtype).eps < np.finfo(np.float64).eps
    assert actual.dtype == rival.dtype
    assert actual.shape == rival.shape == truth.shape
    if not actual.numel():
        return

    def distance(found: Tensor) -> float:
        return float(np.abs(found.double().numpy() - truth).max())

    error = distance(actual)
    nearest = torch.from_numpy(truth.astype(np.float64))
    allowed = distance(rival) + 2 * ulp(nearest, actual.dtype)
    assert error <= allowed, f"error {error:.3g} exceeds the rival's plus 2 ulp, {allowed:.3g}"


def assert_rounded(actual: Tensor, truth: Tensor, terms: Tensor | int, sizes: Tensor) -> None:
    """Assert that a sum of `terms` products is within the rounding error of any order of addition.

    Used where a rival may add fewer products. In any order, the error is at most
    (terms + 1) u sum|products|, where u is the unit roundoff
    (N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    assert truth.dtype == sizes.dtype == torch.float64
    info = torch.finfo(actual.dtype)
    allowed = (terms + 1) * (info.eps / 2 * sizes + info.smallest_normal * info.eps)
    worst = (actual.detach().double() - truth).abs() - allowed
    assert actual.shape == truth.shape
    assert bool((worst <= 0).all()), f"exceeds the rounding bound by {float(worst.max()):.3g}"
