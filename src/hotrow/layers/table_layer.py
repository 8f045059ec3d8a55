"""The base class of layers with a (V, D) table.

It handles one-hot and probability input, and converts to and from linear layers.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_soft
from hotrow.layers.linear import build_linear, check_linear, copy_storage
from hotrow.table.parameter import Table


class TableLayer:
    """The base class of `Embedding` and `EmbeddingBag`."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    weight: Tensor

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, copy: bool = True, **options: Any) -> Self:
        """Create a layer whose lookups equal `linear` applied to the one-hots of the ids.

        The layer's table is the transposed `linear.weight`, of shape (in_features, out_features).

        Args:
            linear: a linear layer without a bias, because a table can't represent a bias.
            copy: whether to copy the weight. If False, both layers share storage, so an optimizer
                that has the parameters of both would update the weight twice.
            options: the layer's other constructor arguments.

        Raises:
            HotrowError: `linear` is not a linear layer, or has a bias.

        >>> from hotrow import Embedding
        >>> linear = torch.nn.Linear(4, 5, bias=False)
        >>> layer = Embedding.from_linear(linear)
        >>> torch.equal(layer(torch.tensor([2])), linear(torch.eye(4)[[2]]))
        True
        """
        check_linear(linear)
        if linear.bias is not None:
            raise HotrowError(
                f"{_describe(linear)} has a bias, which a table can't represent",
                fix="use OneHotLinear.from_linear, which keeps the bias",
            )
        table = copy_storage(linear.weight.t(), copy)
        layer = cls(*table.shape, _weight=table, **options)
        layer.weight.requires_grad_(linear.weight.requires_grad)
        return layer

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """Return a bias-free `torch.nn.Linear` with the same output for one-hot input.

        The linear layer's weight is the transposed table, of shape (D, V). With `copy=False`, both
        layers share storage.

        Raises:
            HotrowError: the layer has `padding_idx`, `max_norm` or `scale_grad_by_freq`, which make
                it train differently from a linear layer.

        >>> from hotrow import Embedding
        >>> layer = Embedding(4, 5)
        >>> layer.to_linear().weight.shape
        torch.Size([5, 4])
        """
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq"):
            value = getattr(self, option)
            if value is not None and value is not False:
                raise HotrowError(
                    f"{type(self).__name__} has {option}={value}, which a linear layer does not "
                    "support",
                    fix=f"build the layer without {option}",
                )
        return build_linear(nn.Linear, self.weight.t(), None, copy)

    def _soft_rows(self, values: Tensor) -> Tensor:
        """Map (..., V) one-hots or probabilities to (..., D): values @ table."""
        if isinstance(self.weight, Table) and self.weight.spans_processes:
            raise HotrowError(
                "input contains one-hots or probabilities, but a sharded or replicated table "
                "accepts only ids, because its gradient would be dense",
                fix="pass ids, or don't shard or replicate this table",
            )
        check_soft(values, len(self.weight), self.weight.dtype)
        if self.scale_grad_by_freq:
            raise HotrowError(
                "input contains one-hots or probabilities, but scale_grad_by_freq counts ids",
                fix="pass ids, or build the layer without scale_grad_by_freq",
            )
        if self.max_norm is not None:
            used = (values != 0).reshape(-1, values.shape[-1]).any(0).nonzero().flatten()
            with torch.no_grad():
                torch.embedding_renorm_(self.weight, used, self.max_norm, self.norm_type)
        if self.padding_idx is None:
            return values @ self.weight
        # Lookups read the padding row like any other row, but it receives no gradient.
        padding = values[..., self.padding_idx, None] * self.weight[self.padding_idx].detach()
        rows = values.index_fill(-1, index_tensor(self.padding_idx, values), 0) @ self.weight
        return rows + padding.to(rows.dtype)  # under autocast, `rows` has the autocast dtype


def index_tensor(row: int, like: Tensor) -> Tensor:
    """Return a row index as a (1,) tensor on the device of `like`."""
    return torch.tensor([row], device=like.device)


def _describe(linear: nn.Linear) -> str:
    return f"Linear({linear.in_features}, {linear.out_features})"
