"""The `EmbeddingBag` layer, which also accepts one-hot, multi-hot and probability input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_bag, check_ids, check_soft
from hotrow.layers.layer_input import as_input_tensor
from hotrow.layers.table_layer import TableLayer, index_tensor
from hotrow.table.parameter import raise_on_all_ranks, table_row_count


class EmbeddingBag(TableLayer, nn.EmbeddingBag):
    """A `torch.nn.EmbeddingBag` that also accepts one-hot, multi-hot and probability tensors.

    The output for a bag is the sum, mean or maximum of the table rows that its ids select. In "sum"
    mode, `per_sample_weights` can scale each row first. A sum equals `multi_hot(bag) @ table`, up
    to rounding.

    The constructor, the `state_dict` keys and all options are the same as in torch. Ids equal to
    `padding_idx` don't count as members of their bag.

    Shapes:
        ids: int64 or int32; (B, L), or (N,) with `offsets` of shape (B,), which give the start of
            each bag. The output is (B, D). The output for an empty bag is all zeros.
        one-hot or probabilities: the table's dtype; (B, L, V), or (N, V) with `offsets`. Each
            member of a bag is a distribution over rows instead of an id. Members equal to the
            one-hot of `padding_idx` are ignored.
        multi-hot: (B, V) without offsets. Row i of the table has weight input[b, i] in bag b. Mode
            "mean" divides by the sum of the weights, unless the sum is 0. Mode "max" raises an
            error. The weight of `padding_idx` is ignored.
        per_sample_weights: the same shape as the ids, (B, L) or (N,).

    Raises:
        HotrowError, HotrowIndexError: in the same cases as `Embedding`, and for invalid offsets.

    Cost: the same as for `Embedding`, except that the forward pass writes B x D values.

    >>> layer = EmbeddingBag.from_pretrained(torch.eye(3), mode="sum")
    >>> layer(torch.tensor([[0, 2, 2]]))
    tensor([[1., 0., 2.]])
    >>> layer(torch.tensor([[1., 0., 2.]]))
    tensor([[1., 0., 2.]])

    Source: `torch.nn.EmbeddingBag` and `torch.nn.functional.embedding_bag`.
    """

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Map ids, or floating-point input with a last dimension of size V, to (B, D)."""
        try:
            return self._bags(input, offsets, per_sample_weights)
        except HotrowError as error:
            raise_on_all_ranks(self.weight, error)

    def _bags(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        input = as_input_tensor(input, self.weight)
        soft = input.is_floating_point()
        if soft and input.ndim == 2 and offsets is None:
            return self._multi_hot(input, per_sample_weights)
        if soft:
            check_soft(input, len(self.weight), self.weight.dtype)
        offsets = check_bag(
            input.shape[:-1] if soft else input.shape,
            offsets,
            per_sample_weights,
            mode=self.mode,
            table=self.weight,
            last=self.include_last_offset,
        )
        if offsets is None and input.shape[1] == 0:
            # torch fails on a (B, 0) batch, but accepts empty bags if offsets describe them.
            bags = len(input) + self.include_last_offset
            offsets = torch.zeros(bags, dtype=torch.int64, device=input.device)
            input = input.flatten(0, 1)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.flatten()
        if not soft:
            refused_encoding: Literal["multi-hot", ""] = "multi-hot" if input.ndim == 2 else ""
            ids = check_ids(
                input, table_row_count(self.weight), "input", refused_encoding=refused_encoding
            )
            return super().forward(ids, offsets, per_sample_weights)
        rows = self._soft_rows(input).flatten(0, -2)  # (N, D)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(rows.dtype)
        is_padding = None
        if self.padding_idx is not None:
            is_padding = input[..., self.padding_idx].flatten() == 1
        return pool_rows(
            rows,
            input.shape[:-1],
            is_padding,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )

    def _multi_hot(self, values: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """Map (B, V) weights to (B, D)."""
        if self.mode == "max" or per_sample_weights is not None:
            what = 'mode="max"' if self.mode == "max" else "per_sample_weights"
            raise HotrowError(
                f"{what} needs the individual members of each bag, but input is a (B, V) multi-hot "
                f"of shape {tuple(values.shape)}, which contains only their sum",
                fix="pass ids, or one-hots of shape (B, L, V)",
            )
        if self.padding_idx is not None:
            values = values.index_fill(-1, index_tensor(self.padding_idx, values), 0)
        rows = self._soft_rows(values)
        if self.mode == "sum":
            return rows
        total = values.sum(-1, keepdim=True)
        return rows / torch.where(total == 0, 1, total)


def pool_rows(
    rows: Tensor,
    shape: Sequence[int],
    is_padding: Tensor | None,
    offsets: Tensor | None,
    **options: Any,
) -> Tensor:
    """Use torch's `embedding_bag` to pool (N, D) rows that have already been looked up.

    `shape` is the shape of the ids; `rows` contains one row for each id. To ignore padding, this
    function points all padding ids to an extra row, and passes the index of that row to torch as
    `padding_idx`.
    """
    positions = torch.arange(len(rows), device=rows.device)
    if is_padding is not None:
        positions = positions.masked_fill(is_padding, len(rows))
    return F.embedding_bag(
        positions.view(tuple(shape)),
        torch.cat([rows, rows.new_zeros(1, rows.shape[1])]),
        offsets,
        padding_idx=len(rows),
        **options,
    )
