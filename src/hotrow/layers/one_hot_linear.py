"""`OneHotLinear`: torch's linear layer, which also takes ids."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from hotrow.ids import check_ids, check_soft
from hotrow.layers.layer_input import as_input_tensor
from hotrow.layers.linear import build_linear, check_linear
from hotrow.table.lookup import look_up


class OneHotLinear(nn.Linear):
    """`torch.nn.Linear` for one-hot input, which also takes the ids themselves.

    For ids, output[..., :] = weight[:, ids[...]] + bias, which is
    linear(one_hot(ids), weight, bias) bit for bit for finite weights (but for the sign of
    a zero). A floating input goes to torch's linear unchanged.

    Constructor, initial values and `state_dict` keys are torch's: `weight` is (D, V),
    `bias` (D,) or None.

    Shapes:
        ids: int64 or int32, (...,); the output is (..., D).
        one-hot or anything a linear layer takes: (..., V); the output is (..., D).

    Raises:
        HotrowError, HotrowIndexError: as `Embedding`.

    Cost: N ids read N x D values, a column of `weight` each, and multiply nothing.

    >>> layer = OneHotLinear(4, 5)
    >>> ids = torch.tensor([2, 3, 1])
    >>> one_hot = torch.nn.functional.one_hot(ids, 4)
    >>> torch.equal(layer(ids), layer(one_hot.float()))
    True

    Source: `torch.nn.Linear` and `torch.nn.functional.embedding`.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, copy: bool = True) -> Self:
        """The same layer, taking ids as well; a copy, or with `copy=False` the same storage."""
        check_linear(linear)
        return build_linear(cls, linear.weight, linear.bias, copy)

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """The plain `torch.nn.Linear`; a copy, or with `copy=False` the same storage."""
        return build_linear(nn.Linear, self.weight, self.bias, copy)

    def forward(self, input: Tensor) -> Tensor:
        """(...,) ids or (..., V) one-hot -> (..., D)."""
        input = as_input_tensor(input, self.weight)
        if input.is_floating_point():
            check_soft(input, self.in_features, self.weight.dtype)
            return super().forward(input)
        ids = check_ids(input, self.in_features, "input")
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        rows = look_up(weight, ids, columns=True)
        device = weight.device.type
        # As torch's linear does: float64 stays.
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            return rows.to(dtype) if bias is None else rows.to(dtype) + bias.to(dtype)
        return rows if bias is None else rows + bias
