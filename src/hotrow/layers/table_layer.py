"""The base of the layers that have a (V, D) table: soft input, and linear layers."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_soft
from hotrow.layers.linear import build_linear, check_linear, copy_storage
from hotrow.table.parameter import Table


class TableLayer:
    """The base of an embedding and a bag: a (V, D) table that ids or probabilities read."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    weight: Tensor

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, copy: bool = True, **options: Any) -> Self:
        """The layer whose look-up gives what `linear` gives for a one-hot.

        Its table is `linear.weight` transposed, (in_features, out_features). It is a copy:
        training one leaves the other alone. With `copy=False` both share one storage,
        and stepping both would move it twice.

        Args:
            linear: without a bias, which a table has no place for.
            copy: whether the table gets a storage of its own.
            options: the layer's other constructor arguments.

        >>> from hotrow import Embedding
        >>> linear = torch.nn.Linear(4, 5, bias=False)
        >>> layer = Embedding.from_linear(linear)
        >>> torch.equal(layer(torch.tensor([2])), linear(torch.eye(4)[[2]]))
        True
        """
        check_linear(linear)
        if linear.bias is not None:
            raise HotrowError(
                f"{_describe(linear)} has a bias, and a table has no place for it",
                fix="use OneHotLinear.from_linear, which keeps it",
            )
        table = copy_storage(linear.weight.t(), copy)
        layer = cls(*table.shape, _weight=table, **options)
        layer.weight.requires_grad_(linear.weight.requires_grad)
        return layer

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """The `torch.nn.Linear` without bias that gives for a one-hot what the look-up gives.

        Its weight is the table transposed, (D, V): a copy, or with `copy=False` the
        same storage. Raises `HotrowError` for a layer with `padding_idx`, `max_norm` or
        `scale_grad_by_freq`, which would train differently from any linear layer.

        >>> from hotrow import Embedding
        >>> layer = Embedding(4, 5)
        >>> layer.to_linear().weight.shape
        torch.Size([5, 4])
        """
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq"):
            value = getattr(self, option)
            if value is not None and value is not False:
                raise HotrowError(
                    f"{type(self).__name__} has {option}={value}, which a linear layer cannot do",
                    fix=f"build the layer without {option} if the two should train alike",
                )
        return build_linear(nn.Linear, self.weight.t(), None, copy)

    def _soft_rows(self, values: Tensor) -> Tensor:
        """(..., V) one-hot or probabilities -> (..., D): values @ table."""
        if isinstance(self.weight, Table) and self.weight.spans_processes:
            raise HotrowError(
                "a sharded or replicated table was given one-hots or probabilities, whose gradient "
                "is dense",
                fix="pass ids, or leave this table out of shard and replicate",
            )
        check_soft(values, len(self.weight), self.weight.dtype)
        if self.scale_grad_by_freq:
            raise HotrowError(
                "scale_grad_by_freq counts ids, and the input is one-hot or probabilities",
                fix="pass ids, or build the layer without scale_grad_by_freq",
            )
        if self.max_norm is not None:
            used = (values != 0).reshape(-1, values.shape[-1]).any(0).nonzero().flatten()
            with torch.no_grad():
                torch.embedding_renorm_(self.weight, used, self.max_norm, self.norm_type)
        if self.padding_idx is None:
            return values @ self.weight
        # The padding row is read like any other, and gets no gradient.
        padding = values[..., self.padding_idx, None] * self.weight[self.padding_idx].detach()
        rows = values.index_fill(-1, index_tensor(self.padding_idx, values), 0) @ self.weight
        return rows + padding.to(rows.dtype)  # under autocast the product is of its dtype


def index_tensor(row: int, like: Tensor) -> Tensor:
    """(1,): one row's number, on the device of `like`."""
    return torch.tensor([row], device=like.device)


def _describe(linear: nn.Linear) -> str:
    return f"Linear({linear.in_features}, {linear.out_features})"
