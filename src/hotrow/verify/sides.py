"""The two sides that `check` compares, and how each side computes its output and gradients.

Only this file may import the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, check_bag, check_ids
from hotrow.inputs.tables import check_table
from hotrow.layers import Embedding, OneHotLinear
from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot
from hotrow.verify import reference

LAYERS = nn.Linear, nn.Embedding, nn.EmbeddingBag  # includes their subclasses, like OneHotLinear


@dataclass(frozen=True)
class Batch:
    """The ids of a batch, and the offsets and weights of its bags.

    Attributes:
        ids: (...,); for bags, (B, L) or (N,).
        mode: the mode of the bags, or None if the batch has no bags.
        offsets: (B,), the start of each bag, or None if the batch has no bags.
        weights: (N,), the weight of each flattened id, or None.
    """

    ids: Tensor
    mode: str | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, a: Any, b: Any, ids: Any, offsets: Any, weights: Tensor | None) -> Batch:
        """Build the batch for two sides; it contains bags if either side is a bag layer."""
        ids = _usable(as_ids(ids))
        bags = [x for x in (a, b) if isinstance(x, nn.EmbeddingBag)]
        if not bags:
            if offsets is not None or weights is not None:
                raise HotrowError(
                    "offsets and per_sample_weights need an EmbeddingBag, but neither side is one",
                    fix="leave them out, or check an EmbeddingBag",
                )
            return cls(ids)
        bag = bags[0]
        if offsets is not None:
            offsets = _usable(as_ids(offsets, "offsets", "offsets"))
        offsets = check_bag(
            ids.shape,
            offsets,
            weights,
            mode=bag.mode,
            table=bag.weight,
            last=bag.include_last_offset,
        )
        if offsets is None:
            offsets = torch.arange(len(ids), device=ids.device) * ids.shape[1]
        elif bag.include_last_offset:
            offsets = offsets[:-1]
        weights = None if weights is None else _usable(weights).detach().reshape(-1)
        return cls(ids, bag.mode, offsets, weights)

    def segments(self) -> Tensor:
        """Return (N,) indices of output rows, one for each flattened id."""
        flat = torch.arange(self.ids.numel(), device=self.ids.device)
        if self.offsets is None:
            return flat
        return torch.bucketize(flat, self.offsets, right=True) - 1


def _usable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be part of an autograd graph: a copy of an inference tensor."""
    return tensor.clone() if tensor.is_inference() else tensor


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its name, its tensors, and a function that computes its output.

    Attributes:
        name: the name in the report.
        tensors: the tensors whose gradients are compared.
        run: a function that computes the output from leaves with the names and storages of
            `tensors`.
        transposed: whether the weight is (D, V).
    """

    name: str
    tensors: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], Tensor]
    transposed: bool = False

    def leaves(self) -> dict[str, Tensor]:
        """Return new leaves that require grad and share storage with the tensors."""
        return {name: _usable(t).detach().requires_grad_() for name, t in self.tensors.items()}

    def compute_results(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Compute the output and the gradients of sum(output * cotangent).

        The gradient of a table is V x D. A sparse gradient stays sparse; its values for repeated
        ids are added up.
        """
        # Build a graph and compute in the table's dtype, regardless of the caller's modes.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(cotangent.device.type, enabled=False),
        ):
            return self._compute_results(cotangent)

    def _compute_results(self, cotangent: Tensor) -> dict[str, Tensor]:
        leaves = self.leaves()
        output = self.run(leaves)
        if output.shape != cotangent.shape:
            raise HotrowError(
                f"the output of {self.name} has shape {tuple(output.shape)}, but the other side's "
                f"output has shape {tuple(cotangent.shape)}"
            )
        results = {"output": output.detach()}
        if not leaves:
            return results
        gradients = torch.autograd.grad(output, list(leaves.values()), cotangent)
        for name, gradient in zip(leaves, gradients, strict=True):
            gradient = _coalesce_in_order(gradient) if gradient.is_sparse else gradient
            key = "gradient" if name == "weight" else f"gradient of {name}"
            results[key] = gradient.t() if name == "weight" and self.transposed else gradient
        return results


def _coalesce_in_order(gradient: Tensor) -> Tensor:
    """Coalesce a sparse gradient by adding up the rows of repeated ids in batch order.

    torch's own `coalesce` sorts the ids first, so it may add the rows in a different order.
    """
    ids, values = gradient._indices()[0], gradient._values()
    touched, slots = torch.unique(ids, return_inverse=True)
    rows = values.new_zeros(len(touched), *values.shape[1:]).index_add_(0, slots, values)
    return torch.sparse_coo_tensor(
        touched[None],
        rows,
        gradient.shape,
        device=gradient.device,
        is_coalesced=True,
        check_invariants=False,
    )


def make_side(x: Any, batch: Batch) -> Side:
    """Return the side for `x`; see `check` for the supported types."""
    if isinstance(x, Tensor):
        return make_matmul_side(check_table(x, "the table"), batch)
    if not isinstance(x, LAYERS):
        raise HotrowError(
            f"check cannot compare a {type(x).__name__}",
            fix="pass a (V, D) tensor, Linear, Embedding, EmbeddingBag or OneHotLinear",
        )
    kind = type(x).__name__
    if "weight" not in x._parameters:
        raise HotrowError(
            f"the weight of the {kind} is computed from other parameters (a parametrization), "
            "which check does not support",
            fix="check a plain layer with the same weight",
        )
    check_table(x.weight, f"the weight of the {kind}")
    if isinstance(x, nn.Linear):
        return _make_linear_side(x, batch)
    name = f"{kind}({x.num_embeddings}, {x.embedding_dim})"
    check_ids(batch.ids, x.num_embeddings)
    # A layer with max_norm rescales its table in place, so use a copy.
    weight = x.weight if x.max_norm is None else x.weight.detach().clone()
    if isinstance(x, nn.EmbeddingBag):
        return _make_bag_side(name, x, weight, batch)
    return Side(name, {"weight": weight}, lambda t: functional_call(x, t, (batch.ids,)))


def make_matmul_side(table: Tensor, batch: Batch) -> Side:
    """Return the side that multiplies the dense one-hot by a (V, D) table."""
    ids = check_ids(batch.ids, len(table))
    if batch.mode is None:
        name = "one-hot @ table"
        return Side(name, {"weight": table}, lambda t: reference.embedding(ids, t["weight"]))
    mode, offsets = batch.mode, batch.offsets
    assert offsets is not None
    return Side(
        "multi-hot @ table",
        {"weight": table} | _weight_tensors(batch),
        lambda t: reference.bag(
            ids.reshape(-1), offsets, t["weight"], mode, t.get("per_sample_weights")
        ),
    )


def _weight_tensors(batch: Batch) -> dict[str, Tensor]:
    return {} if batch.weights is None else {"per_sample_weights": batch.weights}


def make_lookup_side(table: Tensor, batch: Batch) -> Side:
    """Return the side that uses an `Embedding`; its gradient contains only touched rows."""
    layer = Embedding(table.shape[0], table.shape[1], sparse=True, _weight=table)

    def run(t: dict[str, Tensor]) -> Tensor:
        # functional_call would take longer than a small lookup.
        del layer.weight
        layer.weight = t["weight"]
        output: Tensor = layer(batch.ids)
        return output

    return Side("lookup", {"weight": table}, run)


OPERATIONS = "lookup", "gather", "scatter", "count"


def check_operation_name(name: str) -> str:
    """Return the name if it is a valid operation; otherwise, raise an error."""
    if name not in OPERATIONS:
        raise HotrowError(
            f"{name!r} is not an operation on a one-hot", fix=f"use one of {', '.join(OPERATIONS)}"
        )
    return name


@dataclass(frozen=True)
class OperationSides:
    """The two sides of an operation on the one-hot of a batch.

    Attributes:
        literal: the side that multiplies or sums the dense one-hot.
        by_ids: the side where hotrow uses only the ids.
        shape: the shape of the output.
        dtype: the dtype of the output.
    """

    literal: Side
    by_ids: Side
    shape: tuple[int, ...]
    dtype: torch.dtype


def make_operation_sides(name: str, table: Tensor, batch: Batch, seed: int) -> OperationSides:
    """Return the two sides that `check` compares for an operation.

    A lookup reads rows of the table. A gather reads entries of random (N, V) scores, and a scatter
    adds up random (N, D) rows.

    Args:
        name: one of `OPERATIONS`.
        table: (V, D).
        batch: the ids. The shape must be (N,) for all operations except a lookup.
        seed: the seed for the random numbers.
    """
    ids, (classes, columns), dtype = batch.ids, table.shape, table.dtype

    def random(columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        full_dtype = torch.promote_types(dtype, torch.float32)  # the same numbers on all devices
        return torch.randn(
            len(ids), columns, generator=generator, dtype=full_dtype, device="cpu"
        ).to(table)

    def encode() -> Tensor:
        return one_hot(ids, classes, dtype)

    def count() -> Tensor:
        total = encode().sum(0)
        return total.materialize() if isinstance(total, OneHot) else total

    def both(
        formula: str,
        tensors: dict[str, Tensor],
        literal: Callable[[dict[str, Tensor]], Tensor],
        by_ids: Callable[[dict[str, Tensor]], Tensor],
        *shape: int,
    ) -> OperationSides:
        sides = Side(formula, tensors, literal), Side(name, tensors, by_ids)
        return OperationSides(*sides, shape, dtype)

    if name == "lookup":
        sides = make_matmul_side(table, batch), make_lookup_side(table, batch)
        return OperationSides(*sides, (*ids.shape, columns), dtype)
    if name == "gather":
        return both(
            "(one-hot * scores).sum(1)",
            {"scores": random(classes)},
            lambda t: reference.gather(ids, t["scores"]),
            lambda t: (encode() * t["scores"]).sum(1),
            len(ids),
        )
    if name == "scatter":
        return both(
            "one-hot.T @ rows",
            {"rows": random(columns)},
            lambda t: reference.scatter(ids, t["rows"], classes),
            lambda t: encode().T @ t["rows"],
            *(classes, columns),
        )
    return both(
        "one-hot.sum(0)",
        {},
        lambda t: reference.count(ids, classes, dtype),
        lambda t: count(),
        classes,
    )


def _make_linear_side(layer: nn.Linear, batch: Batch) -> Side:
    name = f"{type(layer).__name__}({layer.in_features}, {layer.out_features})"
    tensors = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    ids, mode, offsets = check_ids(batch.ids, layer.in_features), batch.mode, batch.offsets

    def call(t: dict[str, Tensor], input: Tensor) -> Tensor:
        layer_tensors = {key: value for key, value in t.items() if key in tensors}
        output: Tensor = functional_call(layer, layer_tensors, (input,))
        return output

    if mode is None and isinstance(layer, OneHotLinear):
        return Side(name, tensors, lambda t: call(t, ids), transposed=True)
    one_hots = reference.one_hot(
        ids if mode is None else ids.reshape(-1), layer.in_features, layer.weight.dtype
    )
    if mode is None:
        return Side(f"{name} on one-hot", tensors, lambda t: call(t, one_hots), transposed=True)

    def run(t: dict[str, Tensor]) -> Tensor:
        assert offsets is not None
        members = one_hots
        if "per_sample_weights" in t:
            members = members * t["per_sample_weights"].unsqueeze(-1)
        if mode == "max":  # take the maximum of the members' outputs
            return reference.multi_hot(call(t, members), offsets, mode)
        return call(t, reference.multi_hot(members, offsets, mode))

    return Side(f"{name} on multi-hot", tensors | _weight_tensors(batch), run, transposed=True)


def _make_bag_side(name: str, bag: nn.EmbeddingBag, weight: Tensor, batch: Batch) -> Side:
    ids, offsets, tensors = batch.ids, None, {"weight": weight} | _weight_tensors(batch)
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
