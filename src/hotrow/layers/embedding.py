"""Layers that look rows up: torch's own, which also take one-hot and probability input.

Each is a subclass of torch's layer with the same constructor and `state_dict` keys, and
computes with torch's own operators; ids are checked first, so that a bad one is an error
and never another row. V rows, D columns.

Known limits: `torch.fx.symbolic_trace` and `torch.jit.script` cannot see through the checks
(`torch.export` and `torch.compile` can); on a GPU the check waits for the ids, and so cannot be
captured in a CUDA graph; the checks have no sharding rule for tensor parallel layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import check_bag, check_soft, checked
from hotrow.onehot.tensor import OneHot
from hotrow.table.lookup import look_up
from hotrow.table.parameter import Table, count_of, raise_everywhere

_L = TypeVar("_L", bound=nn.Linear)


class _Table:
    """What an embedding and a bag share: a (V, D) table, soft rows, and the linear twin."""

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

        >>> linear = torch.nn.Linear(4, 5, bias=False)
        >>> layer = Embedding.from_linear(linear)
        >>> torch.equal(layer(torch.tensor([2])), linear(torch.eye(4)[[2]]))
        True
        """
        _check_linear(linear)
        if linear.bias is not None:
            raise HotrowError(
                f"{_describe(linear)} has a bias, and a table has no place for it",
                fix="use OneHotLinear.from_linear, which keeps it",
            )
        table = _own(linear.weight.t(), copy)
        layer = cls(*table.shape, _weight=table, **options)
        layer.weight.requires_grad_(linear.weight.requires_grad)
        return layer

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """The `torch.nn.Linear` without bias that gives for a one-hot what the look-up gives.

        Its weight is the table transposed, (D, V): a copy, or with `copy=False` the
        same storage. Raises `HotrowError` for a layer with `padding_idx`, `max_norm` or
        `scale_grad_by_freq`, which would train differently from any linear layer.

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
        return _linear(nn.Linear, self.weight.t(), None, copy)

    def _soft_rows(self, values: Tensor) -> Tensor:
        """(..., V) one-hot or probabilities -> (..., D): values @ table."""
        if isinstance(self.weight, Table) and self.weight.is_spread:
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
        rows = values.index_fill(-1, _index(self.padding_idx, values), 0) @ self.weight
        return rows + padding.to(rows.dtype)  # under autocast the product is of its dtype


class Embedding(_Table, nn.Embedding):
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
            input = _taken(input, self.weight)
            if input.is_floating_point():
                return self._soft_rows(input)
            input = checked(input, count_of(self.weight), "input")
        except HotrowError as error:
            raise_everywhere(self.weight, error)
        return super().forward(input)


class EmbeddingBag(_Table, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` that also takes one-hot, multi-hot and probability tensors.

    A bag's output is the sum, mean or maximum of its ids' rows; in "sum" mode each row may
    be scaled by its `per_sample_weights` first. That is multi_hot(bag) @ table.

    The constructor, `state_dict` keys and every option mean what they mean in torch; ids
    equal to `padding_idx` are left out of their bag.

    Shapes:
        ids: int64 or int32; (B, L), or (N,) with `offsets` of shape (B,) saying where each
            bag starts. The output is (B, D); an empty bag gives zeros.
        one-hot or probabilities: the table's dtype; (B, L, V), or (N, V) with `offsets`:
            one distribution where ids have one id. A member that is the padding row's one-hot is
            left out of its bag.
        multi-hot: (B, V) without offsets: row i of the table enters bag b with weight
            input[b, i]; "mean" divides by the sum of the weights, unless that is 0; "max" is
            refused; the padding row's weight is left out.
        per_sample_weights: shaped as the ids are: (B, L) or (N,).

    Raises:
        HotrowError, HotrowIndexError: as `Embedding`, and for offsets that do not cut the
            ids in order.

    Cost: as `Embedding`, with B x D values written forward.

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
        """(B, L) or (N,) ids, or the same with a last dimension V -> (B, D)."""
        try:
            return self._bags(input, offsets, per_sample_weights)
        except HotrowError as error:
            raise_everywhere(self.weight, error)

    def _bags(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        input = _taken(input, self.weight)
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
            dtype=self.weight.dtype,
            last=self.include_last_offset,
        )
        if offsets is None and input.shape[1] == 0:
            # torch's own fails on bags that are all empty, but for this way of saying it.
            bags = len(input) + self.include_last_offset
            offsets = torch.zeros(bags, dtype=torch.int64, device=input.device)
            input = input.flatten(0, 1)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.flatten()
        if not soft:
            mistakable: Literal["multi-hot", ""] = "multi-hot" if input.ndim == 2 else ""
            ids = checked(input, count_of(self.weight), "input", mistakable=mistakable)
            return super().forward(ids, offsets, per_sample_weights)
        rows = self._soft_rows(input).flatten(0, -2)  # (N, D)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(rows.dtype)
        is_padding = None
        if self.padding_idx is not None:
            is_padding = input[..., self.padding_idx].flatten() == 1
        return bag_of(
            rows,
            input.shape[:-1],
            is_padding,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )

    def _multi_hot(self, values: Tensor, per_sample_weights: Tensor | None) -> Tensor:
        """(B, V) weights -> (B, D)."""
        if self.mode == "max" or per_sample_weights is not None:
            what = 'mode="max"' if self.mode == "max" else "per_sample_weights"
            raise HotrowError(
                f"{what} needs the bag's members one by one, and a (B, V) multi-hot of shape "
                f"{tuple(values.shape)} has added them up",
                fix="pass ids, or one-hots of shape (B, L, V)",
            )
        if self.padding_idx is not None:
            values = values.index_fill(-1, _index(self.padding_idx, values), 0)
        rows = self._soft_rows(values)
        if self.mode == "sum":
            return rows
        total = values.sum(-1, keepdim=True)
        return rows / torch.where(total == 0, 1, total)


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
        _check_linear(linear)
        return _linear(cls, linear.weight, linear.bias, copy)

    def to_linear(self, *, copy: bool = True) -> nn.Linear:
        """The plain `torch.nn.Linear`; a copy, or with `copy=False` the same storage."""
        return _linear(nn.Linear, self.weight, self.bias, copy)

    def forward(self, input: Tensor) -> Tensor:
        """(...,) ids or (..., V) one-hot -> (..., D)."""
        input = _taken(input, self.weight)
        if input.is_floating_point():
            check_soft(input, self.in_features, self.weight.dtype)
            return super().forward(input)
        ids = checked(input, self.in_features, "input")
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        rows = look_up(weight, ids, columns=True)
        device = weight.device.type
        # As torch's linear does: float64 stays.
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            return rows.to(dtype) if bias is None else rows.to(dtype) + bias.to(dtype)
        return rows if bias is None else rows + bias


def bag_of(
    rows: Tensor,
    shape: Sequence[int],
    is_padding: Tensor | None,
    offsets: Tensor | None,
    **options: Any,
) -> Tensor:
    """Torch's own bag, over (N, D) rows that are at hand, one for each id of this shape.

    Those that are padding are left out; in the bag, all of them point at one extra row.
    """
    places = torch.arange(len(rows), device=rows.device)
    if is_padding is not None:
        places = places.masked_fill(is_padding, len(rows))
    return F.embedding_bag(
        places.view(tuple(shape)),
        torch.cat([rows, rows.new_zeros(1, rows.shape[1])]),
        offsets,
        padding_idx=len(rows),
        **options,
    )


def _taken(input: Any, weight: Tensor) -> Tensor:
    """The input, known to be a tensor; an integer `hotrow.one_hot` is a one-hot, and no ids."""
    if isinstance(input, OneHot) and not input.is_floating_point():
        return input.to(weight.dtype)
    if not isinstance(input, Tensor):
        raise HotrowError(
            f"input is a {type(input).__name__}, but a layer takes a tensor",
            fix="use torch.tensor(input)",
        )
    return input


def _check_linear(linear: Any) -> None:
    if not isinstance(linear, nn.Linear):
        raise HotrowError(f"from_linear takes a torch.nn.Linear, not a {type(linear).__name__}")


def _describe(linear: nn.Linear) -> str:
    return f"Linear({linear.in_features}, {linear.out_features})"


def _index(row: int, like: Tensor) -> Tensor:
    return torch.tensor([row], device=like.device)


def _own(values: Tensor, copy: bool) -> Tensor:
    """The values in a contiguous storage of their own, or in the one they have."""
    values = values.detach()
    return values.clone(memory_format=torch.contiguous_format) if copy else values


def _linear(kind: type[_L], weight: Tensor, bias: Tensor | None, copy: bool) -> _L:
    """A linear layer around a (D, V) weight and a bias that exist already."""
    columns, rows = weight.shape
    # On "meta" nothing is allocated or initialised only to be replaced.
    layer = kind(rows, columns, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(_own(weight, copy), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(_own(bias, copy), bias.requires_grad)
    return layer
