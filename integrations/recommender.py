"""torchfm's DeepFM, a click prediction model with 26 categorical fields in one table."""

from __future__ import annotations

import torch
from torch import nn
from torchfm.model.dfm import DeepFactorizationMachineModel

from integrations.common import Clock, compare, library_of

FIELDS = [100_000, 50_000, 20_000, *[500] * 23]
BATCH, STEPS = 512, 12


def train(model: nn.Module, way: str, clock: Clock) -> None:
    """Train on random clicks."""
    options = {"fused": True} if way == "fused" else {}
    optimizer = library_of(way).Adam(model.parameters(), lr=1e-3, **options)
    for _ in range(STEPS):
        popular = torch.rand(BATCH, len(FIELDS)).pow(3)
        ids = (popular * torch.tensor(FIELDS)).long()
        clicks = torch.randint(2, (BATCH,)).float()
        optimizer.zero_grad()
        chances = model(ids)
        nn.functional.binary_cross_entropy(chances, clicks.to(chances.dtype)).backward()
        optimizer.step()
        clock.tick()


if __name__ == "__main__":
    torch.manual_seed(0)
    compare(
        f"torchfm DeepFM, {sum(FIELDS):,} ids in {len(FIELDS)} fields",
        DeepFactorizationMachineModel(FIELDS, 16, (64, 32), dropout=0.0),
        train,
        tables=2,
    )
