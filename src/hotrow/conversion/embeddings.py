"""The embeddings in a model, and which of them can be tables."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn


def find_embeddings(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag, str]]:
    """Return (path, module, reason) of each embedding; the reason says why it can't be a table.

    The reason is "" if it can.
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


def _obstacle(module: nn.Embedding | nn.EmbeddingBag, other_uses: Counter[int]) -> str:
    """Return why the embedding's weight can't be a table, or ""."""
    weight: Tensor = module.weight
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if other_uses[id(weight)]:
        return "its weight is also used densely (a tied head), so its gradient is dense"
    if not weight.is_floating_point():
        return "its weight is not floating point"
    return ""
