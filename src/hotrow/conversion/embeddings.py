"""Find the embeddings in a model, and decide which of them can become tables."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import nn

from hotrow.table.parameter import Table, find_taken_name

# The `min_entries` with which `convert` last saw each embedding, for the report.
min_entries_of: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def find_embeddings(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag, str]]:
    """Return (path, module, reason) for each embedding.

    The reason says why the embedding can't become a table, and is "" if it can.
    """
    other_uses: Counter[int] = Counter()
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            other_uses.update(id(parameter) for parameter in module.parameters(recurse=False))
    embeddings = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.append((path, module, _obstacle(module, other_uses)))
    return embeddings


def weight_of(module: nn.Embedding | nn.EmbeddingBag) -> nn.Parameter | None:
    """Return the weight if it is a parameter, without computing it if it is not."""
    return module._parameters.get("weight")


def _obstacle(module: nn.Embedding | nn.EmbeddingBag, other_uses: Counter[int]) -> str:
    """Return why the embedding's weight can't become a table, or "" if it can."""
    weight = weight_of(module)
    if weight is None:
        return "its weight is computed from other parameters"
    if other_uses[id(weight)]:
        return "another layer also uses its weight (a tied head), so its gradient is dense"
    if not (type(weight) is nn.Parameter or isinstance(weight, Table)):
        return f"its weight is a {type(weight).__name__}, whose class can't change"
    if not weight.is_floating_point():
        return "its weight is not floating point"
    if not isinstance(weight, Table) and (name := find_taken_name(weight)):
        return f"its weight has an attribute {name}, whose name tables use"
    return ""
