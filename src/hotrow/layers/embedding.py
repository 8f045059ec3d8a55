"""`Embedding`: torch's layer, which also takes one-hot and probability input."""

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
    """`torch.nn.Embedding` that also takes one-hot and probability tensors.

    For ids, output[..., :] = table[ids[...], :], which is one_hot(ids) @ table, bit for bit
    for a finite table (but for the sign of a zero). For a floating input of last dimension V it
    is input @ table, differentiable in both.

    The constructor, `state_dict` keys and the meaning of `padding_idx`, `max_norm`,
    `scale_grad_by_freq` and `sparse` are torch's; a checkpoint goes both ways.

    Shapes:
        ids: int64 or int32, (...,); the output is (..., D).
        one-hot or probabilities: the table's dtype, (..., V); the output is (..., D). A
            `hotrow.one_hot` of any dtype is looked up.

    Raises:
        HotrowError: wrong dtype or last dimension; integers that are a one-hot;
            one-hot input with `scale_grad_by_freq`, which counts ids.
        HotrowIndexError: an id outside 0..V-1. Nothing has changed by then.

    Cost: N ids write N x D values and multiply nothing; the gradient is torch's, V x D with
    zeros for rows not looked up, or with `sparse=True` one row for each id.

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
        """The layer of a table in a safetensors file, of which only the rows in use are read.

        Its weight is the file, mapped: it has no gradient, and nobody writes to it. To train a
        table in files, see `hotrow.disk`.

        Args:
            path: of the file.
            tensor: its name there; may be None if it is the only table.
            options: the layer's other constructor arguments.
        """
        from hotrow.inputs.files import read_table  # not with every `import hotrow`

        _, table = read_table(path, tensor)
        rows, columns = table.shape
        layer = cls(rows, columns, _weight=table, **options)
        layer.weight.requires_grad_(False)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """(...,) ids or (..., V) one-hot or probabilities -> (..., D)."""
        try:
            input = as_input_tensor(input, self.weight)
            if input.is_floating_point():
                return self._soft_rows(input)
            input = check_ids(input, table_row_count(self.weight), "input")
        except HotrowError as error:
            raise_on_all_ranks(self.weight, error)
        return super().forward(input)
