"""A model with a table, and a training loop, for tests of GPU code."""

import torch
from torch import nn

import hotrow
from hotrow.table.parameter import Table

ROWS, COLUMNS = 24, 5


def make_training(
    name="AdamW", options=None, package=hotrow.optim, dtype=torch.float32, tables=1, **layer
):
    """Return a model and its optimizer; with hotrow.optim, the embeddings are tables."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(ROWS, COLUMNS, **layer), nn.Linear(COLUMNS, 2))
    layers.extend(nn.Embedding(ROWS + k, COLUMNS) for k in range(1, tables))
    layers.to(dtype)
    if package is hotrow.optim:
        hotrow.convert(layers, min_entries=0)
        assert isinstance(layers[0].weight, Table)
    return layers, getattr(package, name)(layers.parameters(), **options or {})


def batches(count, size=6, seed=1):
    """Return batches of ids from the first half of the rows."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS // 2, (size,), generator=random) for _ in range(count)]


def train(layers, optimizer, all_ids, after_backward=None):
    """Train on each batch; the gradients of the table don't depend on the table."""
    for ids in all_ids:
        optimizer.zero_grad()
        scale = torch.arange(ids.numel() * COLUMNS).view(*ids.shape, COLUMNS)
        scale = scale.to(layers[1].weight.dtype)  # `to(table)` would settle the table
        output = layers[0](ids)
        ((output * scale.cos()).sum() + layers[1](scale.sin()).pow(2).mean()).backward()
        if after_backward is not None:
            after_backward(layers)
        optimizer.step()
