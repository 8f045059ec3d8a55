"""PyTorch Geometric's TransE, a model of a knowledge graph.

With `sparse=True`, the model needs SparseAdam, which trains a different model than Adam: the
momentum of an entity changes only when a batch contains the entity.
"""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import TransE

import hotrow
from integrations.common import Clock, compare

ENTITIES, RELATIONS, COLUMNS, BATCH, STEPS = 100_000, 20, 64, 1_000, 12


def make(sparse: bool) -> TransE:
    """Create the model, with the same weights in every call."""
    torch.manual_seed(0)
    return TransE(ENTITIES, RELATIONS, COLUMNS, sparse=sparse)


def train(model: nn.Module, way: str, clock: Clock) -> None:
    """Train on random triples."""
    for layer in model.modules():  # SparseAdam needs sparse gradients
        if isinstance(layer, nn.Embedding):
            layer.sparse = way == "SparseAdam"
    optimizer = {
        "dense": lambda p: torch.optim.Adam(p, lr=0.01),
        "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
        "hotrow": lambda p: hotrow.optim.Adam(p, lr=0.01),
    }[way](list(model.parameters()))
    for _ in range(STEPS):
        # In real graphs, a few entities have many edges.
        heads, tails = (torch.rand(2, BATCH).pow(4) * ENTITIES).long()
        relations = torch.randint(RELATIONS, (BATCH,))
        optimizer.zero_grad()
        model.loss(heads, relations, tails).backward()
        optimizer.step()
        clock.tick()


if __name__ == "__main__":
    compare(
        f"PyTorch Geometric TransE, {ENTITIES:,} entities",
        make(sparse=True),
        train,
        ("dense", "fused", "SparseAdam", "hotrow"),
        differs="SparseAdam",
        tables=2,
    )
