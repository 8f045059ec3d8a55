"""The `Embedding` layer, which also accepts one-hot and probability input."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_ids
from hotrow.layers.layer_input import as_input_tensor
from hotrow.layers.table_layer import TableLayer
from hotrow.table.parameter import raise_on_all_ranks, table_row_count


class Embedding(TableLayer, nn.Embedding):
    """A `torch.nn.Embedding` that also accepts one-hot and probability tensors.

    For ids, `output[..., :] = table[ids[...], :]`. If all table values are finite, the output
    equals `one_hot(ids) @ table` bit for bit, except for the sign of zeros. For floating-point
    input with a last dimension of size V, the output is `input @ table`, and both the input and the
    table receive gradients.

    The constructor, the `state_dict` keys, and the options `padding_idx`, `max_norm`,
    `scale_grad_by_freq` and `sparse` are the same as in torch. hotrow's and torch's layers can load
    each other's checkpoints.

    Shapes:
        ids: int64 or int32, (...,); the output is (..., D).
        one-hot or probabilities: the table's dtype, (..., V); the output is (..., D). A
            `hotrow.one_hot` can have any dtype.

    Raises:
        HotrowError: the dtype or the last dimension is wrong, integer input looks like a one-hot,
            or the layer has `scale_grad_by_freq` but gets one-hots or probabilities.
        HotrowIndexError: an id is outside 0..V-1. The layer raises this error before it changes
            anything.

    Cost: a lookup of N ids writes N x D values and performs no multiplications. The gradient is the
    same as in torch: V x D values with zeros for untouched rows or, with `sparse=True`, one row for
    each id. After `hotrow.convert`, the gradient contains only the touched rows.

    >>> import torch
    >>> layer = Embedding.from_pretrained(torch.tensor([[1., 2.], [3., 4.], [5., 6.]]))
    >>> layer(torch.tensor([2, 0]))
    tensor([[5., 6.],
            [1., 2.]])
    >>> layer(torch.tensor([[0.5, 0.5, 0.0]]))
    tensor([[2., 3.]])

    Source: `torch.nn.Embedding` and `torch.nn.functional.embedding`.
    """

    @classmethod
    def from_file(cls, path: str | Path, tensor: str | None = None, **options: Any) -> Self:
        """Create a layer from a table in a safetensors file, without reading the whole file.

        The weight is memory-mapped, so the layer reads only the rows that it looks up. The weight
        is read-only and has no gradient. To train a table on disk, see `hotrow.disk`. Don't read
        its file with `from_file` while a store has the folder open: each save changes the rows.

        Args:
            path: the safetensors file.
            tensor: the tensor's name in the file; may be None if the file contains only one table.
            options: the layer's other constructor arguments.

        Raises:
            HotrowError: the file can't be read, or doesn't contain the table.
        """
        from hotrow.inputs.files import read_table  # deferred to keep `import hotrow` fast

        _, table = read_table(path, tensor)
        rows, columns = table.shape
        layer = cls(rows, columns, _weight=table, **options)
        layer.weight.requires_grad_(False)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Map (...,) ids, or (..., V) one-hots or probabilities, to (..., D)."""
        try:
            input = as_input_tensor(input, self.weight)
            if input.is_floating_point():
                return self._soft_rows(input)
            input = check_ids(input, table_row_count(self.weight), "input")
        except HotrowError as error:
            raise_on_all_ranks(self.weight, error)
        return super().forward(input)
