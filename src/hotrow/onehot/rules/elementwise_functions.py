"""The elementwise functions that have a rule, grouped by their properties."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hotrow.onehot.registry import overloads

PRODUCTS = {*overloads("mul", "multiply"), Tensor.__mul__, Tensor.__rmul__}
# Functions that are linear in the first argument, without options such as `rounding_mode`.
LINEAR = PRODUCTS | {
    *overloads("div", "divide", "true_divide", "neg", "negative"),
    *(Tensor.__truediv__, Tensor.__neg__),
}
# Functions that are zero if either argument is zero.
ABSORBING = PRODUCTS | {
    *overloads("logical_and", "bitwise_and"),
    *(Tensor.__and__, Tensor.__rand__),
}
UNIONS = {*overloads("logical_or", "bitwise_or"), Tensor.__or__, Tensor.__ror__}
SUMS = {
    **dict.fromkeys((*overloads("add"), Tensor.__add__), 1),
    **dict.fromkeys((*overloads("sub", "subtract"), Tensor.__sub__), -1),
}
# Functions whose result for the fill may be infinite. If an entry at an id replaced this result,
# the gradient there would be 0 times infinity, which is NaN.
SINGULAR = {
    *overloads("div", "divide", "true_divide", "pow", "xlogy"),
    *(Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__rpow__),
}
# Functions that take several numbers. Torch reads a 0-D tensor among them as a number.
SEVERAL_NUMBERS = {*overloads("clamp", "clip", "nan_to_num")}
_OTHER_NAMES = (
    *("abs", "absolute", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt"),
    *("square", "reciprocal", "sigmoid", "tanh", "sign", "relu", "logical_not", "bitwise_not"),
    *("isnan", "isinf", "isfinite", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "pow"),
    *("rsub", "maximum", "minimum", "fmax", "fmin", "xlogy"),
    *("eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge"),
    *("greater_equal", "logical_or", "logical_xor", "bitwise_or", "bitwise_xor"),
)
_OTHER_METHODS = (
    *(Tensor.__radd__, Tensor.__rsub__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__rpow__),
    *(Tensor.__abs__, Tensor.__invert__, Tensor.__or__, Tensor.__ror__, Tensor.__xor__),
    *(Tensor.__rxor__, Tensor.__eq__, Tensor.__ne__, Tensor.__lt__, Tensor.__le__),
    *(Tensor.__gt__, Tensor.__ge__, F.relu),
)
ELEMENTWISE = {*LINEAR, *ABSORBING, *SUMS, *overloads(*_OTHER_NAMES), *_OTHER_METHODS}
