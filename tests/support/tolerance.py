"""The tolerances that tests use. Don't loosen a tolerance just to make a test pass."""

import numpy as np
import torch
from torch import Tensor


def ulp(values: Tensor, dtype: torch.dtype) -> float:
    """Return the spacing of `dtype` numbers at the largest magnitude in `values`."""
    size = float(values.abs().max()) if values.numel() else 0.0
    return max(size * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert bitwise equality, for values that are only selected, or added in a fixed order."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, b = actual.detach().contiguous().view(bits), expected.detach().contiguous().view(bits)
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} values differ"


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """Assert numerical equality: 0.0 equals -0.0, because a sum starting at 0.0 is never -0.0."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


def assert_no_worse(actual: Tensor, rival: Tensor, truth: Tensor | np.ndarray) -> None:
    """Assert that the error is at most the rival's error plus 2 ulp, for sums in any order.

    `truth` is in float64, or in numpy's long double for float64 values. The extra 2 ulp of
    the largest value allow for a rival that is accurate by chance.
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
    assert error <= allowed, (
        f"error {error:.3g} exceeds {allowed:.3g}, the rival's error plus 2 ulp"
    )


def assert_rounded(actual: Tensor, truth: Tensor, terms: Tensor | int, sizes: Tensor) -> None:
    """Assert that sums of `terms` products are within the error bound for any order of addition.

    Use this instead of `assert_no_worse` if the rival may add fewer products. In any order, the
    error is at most (terms + 1) u sum|products|, where u is the unit roundoff
    (N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    assert truth.dtype == sizes.dtype == torch.float64
    info = torch.finfo(actual.dtype)
    allowed = (terms + 1) * (info.eps / 2 * sizes + info.smallest_normal * info.eps)
    worst = (actual.detach().double() - truth).abs() - allowed
    assert actual.shape == truth.shape
    assert bool((worst <= 0).all()), f"the error exceeds its bound by {float(worst.max()):.3g}"
