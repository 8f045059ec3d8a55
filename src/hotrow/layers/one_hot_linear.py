"""The `OneHotLinear` layer, a linear layer that also accepts ids."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from hotrow.ids import check_ids, check_soft
from hotrow.layers.layer_input import as_input_tensor
from hotrow.layers.linear import build_linear, check_linear
from hotrow.table.lookup import look_up


class OneHotLinear(nn.Linear):
    """A `torch.nn.Linear` for one-hot input that also accepts the ids themselves.

    For ids, `output[..., :] = weight[:, ids[...]] + bias`. If the weights are finite, the output
    equals `linear(one_hot(ids), weight, bias)` bit for bit, except for the sign of zeros. For
    floating-point input, the layer works like `torch.nn.Linear`.

    The constructor, the initial values and the `state_dict` keys are the same as in torch. `weight`
    is (D, V), and `bias` is (D,) or None.

    Shapes:
        ids: int64 or int32, (...,); the output is (..., D).
        one-hot, or any other input to a linear layer: (..., V); the output is (..., D).

    Raises:
        HotrowError, HotrowIndexError: in the same cases as `Embedding`.

    Cost: a lookup of N ids reads N x D values, one column of `weight` for each id, and performs no
    multiplications.

    >>> layer = OneHotLinear(4, 5)
    >>> ids = torch.tensor([2, 3, 1])
    >>> one_hot = torch.nn.functional.one_hot(ids, 4)
    >>> torch.equal(layer(ids), layer(one_hot.float()))
    True

    Source: `torch.nn.Linear` and `torch.nn.functional.embedding`.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, copy: bool = True) -> Self:
        """Create the layer from a linear layer; with `copy=False`, both layers share storage."""
        check_linear(linear)
        return build_linear(cls, linear.weight, linear.bias, copy)

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """Return a plain `torch.nn.Linear`; with `copy=False`, both layers share storage."""
        return build_linear(nn.Linear, self.weight, self.bias, copy)

    def forward(self, input: Tensor) -> Tensor:
        """Map (...,) ids or (..., V) one-hots to (..., D)."""
        input = as_input_tensor(input, self.weight)
        if input.is_floating_point():
            check_soft(input, self.in_features, self.weight.dtype)
            return super().forward(input)
        ids = check_ids(input, self.in_features, "input")
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        rows = look_up(weight, ids, columns=True)
        device = weight.device.type
        # As in `torch.nn.Linear`, autocast doesn't cast float64 values.
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            return rows.to(dtype) if bias is None else rows.to(dtype) + bias.to(dtype)
        return rows if bias is None else rows + bias
