"""Find the layers and parameters that have a row for each id of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotrow.errors import HotrowError
from hotrow.layers import OneHotLinear
from hotrow.table.parameter import Table, table_row_count
from hotrow.table.row_change import RowChange

Embeddings = nn.Embedding, nn.EmbeddingBag


@dataclass
class VocabularyLayers:
    """The weight with a row for each id, and the layers that use it.

    Attributes:
        weight: (V, D), or (D, V) if ids select columns.
        columns: whether ids select columns.
        layer: the first layer that uses the weight.
        users: all layers that use the weight.
        biases: the biases (V,) of the tied linear layers.
    """

    weight: nn.Parameter
    columns: bool
    layer: nn.Module
    users: list[nn.Module]
    biases: list[nn.Parameter]

    @property
    def row_count(self) -> int:
        """V, the number of rows."""
        return self.weight.shape[1] if self.columns else table_row_count(self.weight)

    @property
    def parameters(self) -> list[tuple[nn.Parameter, bool]]:
        """The weight and the biases, and whether ids select their columns."""
        return [(self.weight, self.columns), *((bias, False) for bias in self.biases)]

    def padding_rows(self) -> Tensor:
        """Return the padding rows of the layers, int64."""
        indices = (getattr(user, "padding_idx", None) for user in self.users)
        rows = [index for index in indices if index is not None]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def frozen_rows(self) -> Tensor:
        """Return the frozen rows, int64."""
        frozen = self.weight.frozen_rows if isinstance(self.weight, Table) else None
        return torch.empty(0, dtype=torch.int64, device="cpu") if frozen is None else frozen

    def set_row_count(self, change: RowChange) -> None:
        """Update the sizes and padding rows that the layers store."""
        for user in self.users:
            if isinstance(user, Embeddings):
                user.num_embeddings = change.new_count
                if user.padding_idx is not None:
                    padding = torch.tensor(user.padding_idx, device="cpu")
                    user.padding_idx = int(change.new_ids(padding))
            elif isinstance(user, nn.Linear):
                name = "in_features" if self.columns else "out_features"
                setattr(user, name, change.new_count)


def find_layers(layer: nn.Module, model: nn.Module | None = None) -> VocabularyLayers:
    """Return the weight of a layer, or of a model's only embedding, and all layers that use it.

    Arguments:
        layer: an embedding, a linear layer, or a model with one embedding.
        model: the model to search for other layers that use the weight.

    Raises:
        HotrowError: `layer` has no weight with a row for each id, or has several such weights.
    """
    for name, value in (("layer", layer), ("model", model)):
        if not (isinstance(value, nn.Module) or (name == "model" and value is None)):
            raise HotrowError(f"{name} is a {type(value).__name__}, but it must be a torch module")
    model = layer if model is None else model
    first = layer if isinstance(layer, (*Embeddings, nn.Linear)) else _only_embedding(layer)
    weight = first._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.ndim != 2:
        raise HotrowError(
            f"the weight of {type(first).__name__} is not a (V, D) parameter",
            fix="initialize a lazy layer, and remove parametrizations",
        )
    columns = weight.columns if isinstance(weight, Table) else isinstance(first, OneHotLinear)
    users = [
        module
        for module in model.modules()
        if any(parameter is weight for parameter in module._parameters.values())
    ]
    if first not in users:
        users.insert(0, first)
    biases: list[nn.Parameter] = []
    for user in users:
        bias = user._parameters.get("bias") if isinstance(user, nn.Linear) else None
        if bias is not None and not columns and all(bias is not other for other in biases):
            biases.append(bias)
    return VocabularyLayers(weight, columns, first, users, biases)


def _only_embedding(model: nn.Module) -> nn.Module:
    """Return an embedding of a model, if all of its embeddings have the same weight."""
    embeddings = {
        path: module for path, module in model.named_modules() if isinstance(module, Embeddings)
    }
    weights = {id(module.weight) for module in embeddings.values()}
    if len(weights) == 1:
        return next(iter(embeddings.values()))
    if weights:
        raise HotrowError(
            f"{type(model).__name__} has {len(weights)} embeddings: {', '.join(embeddings)}",
            fix="pass the layer as the first argument, and the model as model=",
        )
    raise HotrowError(
        f"{type(model).__name__} has no embedding", fix="pass a layer with a row for each id"
    )


def is_on_disk(weight: nn.Parameter) -> bool:
    """Return whether the weight is a table on disk."""
    return isinstance(weight, Table) and weight.backing is not None


def check_in_memory(weight: nn.Parameter, operation: str) -> None:
    """Raise an error if the weight is on disk."""
    if is_on_disk(weight):
        raise HotrowError(
            f"{operation} is not supported for a table on disk",
            fix="only hotrow.vocabulary.resize, take and Vocabulary can change a table on disk",
        )
