"""The ways to compute on a batch that `check` compares. The only importer of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hotrow import reference
from hotrow.errors import HotrowError
from hotrow.ids import as_ids, checked, checked_offsets
from hotrow.layers import Embedding, OneHotLinear
from hotrow.tables import check_table


@dataclass(frozen=True)
class Batch:
    """The ids, and for bags where they are cut and how they are weighted.

    Attributes:
        ids: (...,); for bags (B, L) or (N,).
        mode: of the bag, or None if there is none.
        offsets: (B,) of the bags, or None if there are none.
        weights: (N,) of the flat ids, or None.
    """

    ids: Tensor
    mode: str | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, a: Any, b: Any, ids: Any, offsets: Any, weights: Tensor | None) -> Batch:
        """The batch for two sides, which make it bags if one of them is a bag."""
        ids = as_ids(ids)
        bags = [x for x in (a, b) if isinstance(x, nn.EmbeddingBag)]
        if not bags:
            if offsets is not None or weights is not None:
                raise HotrowError("offsets and per_sample_weights are for bags, and neither is one")
            return cls(ids)
        if ids.ndim not in (1, 2) or (ids.ndim == 1) != (offsets is not None):
            raise HotrowError(
                f"bags take (B, L) ids without offsets or (N,) ids with them, "
                f"not ids of shape {tuple(ids.shape)} with{'' if offsets is not None else 'out'}"
            )
        if weights is not None and weights.shape != ids.shape:
            raise HotrowError(
                f"per_sample_weights has shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}"
            )
        last = bags[0].include_last_offset
        if offsets is None:
            offsets = torch.arange(len(ids), device=ids.device) * ids.shape[1]
        else:
            offsets = checked_offsets(as_ids(offsets, "offsets"), len(ids), last)
            offsets = offsets[:-1] if last else offsets
        weights = None if weights is None else weights.detach().reshape(-1)
        return cls(ids, bags[0].mode, offsets, weights)

    def segments(self) -> Tensor:
        """(N,): the output row that each flat id goes to."""
        flat = torch.arange(self.ids.numel(), device=self.ids.device)
        if self.offsets is None:
            return flat
        return torch.bucketize(flat, self.offsets, right=True) - 1


@dataclass(frozen=True)
class Side:
    """One way to compute: its name, its tensors, and how its output follows from them.

    Attributes:
        name: in words, for the report.
        tensors: what gradients are taken of.
        run: from leaves with the same names and storages to the output.
        transposed: whether the weight is (D, V).
    """

    name: str
    tensors: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], Tensor]
    transposed: bool = False

    def leaves(self) -> dict[str, Tensor]:
        """The same storages, as fresh leaves of a graph: frozen tensors have a gradient too."""
        return {name: t.detach().requires_grad_() for name, t in self.tensors.items()}

    def results(self, cotangent: Tensor) -> dict[str, Tensor]:
        """The output, and the gradients of sum(output * cotangent), tables as V x D.

        A sparse gradient stays so: the touched rows, repeated ids added up.
        """
        leaves = self.leaves()
        output = self.run(leaves)
        if output.shape != cotangent.shape:
            raise HotrowError(
                f"{self.name} gives an output of shape {tuple(output.shape)}, "
                f"the other side {tuple(cotangent.shape)}"
            )
        results = {"output": output.detach()}
        gradients = torch.autograd.grad(output, list(leaves.values()), cotangent)
        for name, gradient in zip(leaves, gradients, strict=True):
            gradient = _touched_rows(gradient) if gradient.is_sparse else gradient
            key = "gradient" if name == "weight" else f"gradient of {name}"
            results[key] = gradient.t() if name == "weight" and self.transposed else gradient
        return results


def _touched_rows(gradient: Tensor) -> Tensor:
    """A sparse gradient with each row once, repeated ids added in batch order.

    torch's own `coalesce` adds them in the order that its sort leaves them in.
    """
    ids, values = gradient._indices()[0], gradient._values()
    touched, slots = torch.unique(ids, return_inverse=True)
    rows = values.new_zeros(len(touched), *values.shape[1:]).index_add_(0, slots, values)
    return torch.sparse_coo_tensor(
        touched[None], rows, gradient.shape, is_coalesced=True, check_invariants=False
    )


def side(x: Any, batch: Batch) -> Side:
    """How `x` computes on `batch`; see `check` for what `x` may be."""
    if isinstance(x, Tensor):
        return matmul_side(check_table(x, "the table"), batch)
    if isinstance(x, nn.Linear):
        return _linear_side(x, batch)
    if isinstance(x, nn.Embedding | nn.EmbeddingBag):
        name = f"{type(x).__name__}({x.num_embeddings}, {x.embedding_dim})"
        checked(batch.ids, x.num_embeddings)
        # A layer with max_norm rescales its table in place: give it one of its own.
        weight = x.weight if x.max_norm is None else x.weight.detach().clone()
        if isinstance(x, nn.EmbeddingBag):
            return _bag_side(name, x, weight, batch)
        return Side(name, {"weight": weight}, lambda t: functional_call(x, t, (batch.ids,)))
    raise HotrowError(
        f"check cannot compare a {type(x).__name__}",
        fix="give a (V, D) tensor, Linear, Embedding, EmbeddingBag or OneHotLinear",
    )


def matmul_side(table: Tensor, batch: Batch) -> Side:
    """The literal one-hot matmul with a (V, D) table."""
    checked(batch.ids, len(table))
    if batch.mode is None:
        return Side(
            "one-hot @ table",
            {"weight": table},
            lambda t: reference.embedding(batch.ids, t["weight"]),
        )
    return _dense_bag("multi-hot @ table", {"weight": table}, batch)


def lookup_side(table: Tensor, batch: Batch) -> Side:
    """The look-up of `Embedding` in a (V, D) table; the gradient has touched rows only."""
    layer = Embedding(table.shape[0], table.shape[1], sparse=True, _weight=table)

    def run(t: dict[str, Tensor]) -> Tensor:
        # Not by functional_call, whose own time is longer than a small look-up's.
        del layer.weight
        layer.weight = t["weight"]
        output: Tensor = layer(batch.ids)
        return output

    return Side("look-up", {"weight": table}, run)


def _linear_side(layer: nn.Linear, batch: Batch) -> Side:
    name = f"{type(layer).__name__}({layer.in_features}, {layer.out_features})"
    tensors = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    input = checked(batch.ids, layer.in_features)
    if batch.mode is not None:
        return _dense_bag(f"{name} on multi-hot", tensors, batch, transposed=True)
    if not isinstance(layer, OneHotLinear):
        name = f"{name} on one-hot"
        input = reference.one_hot(input, layer.in_features, layer.weight.dtype)
    return Side(name, tensors, lambda t: functional_call(layer, t, (input,)), transposed=True)


def _bag_side(name: str, bag: nn.EmbeddingBag, weight: Tensor, batch: Batch) -> Side:
    ids, offsets, tensors = batch.ids, None, {"weight": weight}
    if batch.weights is not None:
        tensors["per_sample_weights"] = batch.weights
    if ids.ndim == 1:
        end = [len(ids)] if bag.include_last_offset else []
        assert batch.offsets is not None
        offsets = torch.cat([batch.offsets, batch.offsets.new_tensor(end)])

    def run(t: dict[str, Tensor]) -> Tensor:
        weights = t.get("per_sample_weights")
        weights = None if weights is None else weights.view(ids.shape)
        output: Tensor = functional_call(bag, {"weight": t["weight"]}, (ids, offsets, weights))
        return output

    return Side(name, tensors, run)


def _dense_bag(
    name: str, tensors: dict[str, Tensor], batch: Batch, *, transposed: bool = False
) -> Side:
    ids, offsets, mode = batch.ids.reshape(-1), batch.offsets, batch.mode
    assert offsets is not None
    assert mode is not None
    if batch.weights is not None:
        tensors = tensors | {"per_sample_weights": batch.weights}

    def run(t: dict[str, Tensor]) -> Tensor:
        table = t["weight"].t() if transposed else t["weight"]
        output = reference.bag(ids, offsets, table, mode, t.get("per_sample_weights"))
        return output + t["bias"] if "bias" in t else output

    return Side(name, tensors, run, transposed)
