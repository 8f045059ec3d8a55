"""A training loop with accelerate: gradient accumulation and clipping."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from integrations.common import Clock, compare, library_of

ITEMS, COLUMNS, LENGTH, BATCH, STEPS = 200_000, 32, 16, 256, 12


def train(model: nn.Module, way: str, clock: Clock) -> None:
    """Train on random sequences, with one optimizer step for every two batches."""
    source = torch.Generator().manual_seed(2)
    ids = (torch.rand(2 * STEPS * BATCH, LENGTH, generator=source).pow(3) * ITEMS).long()
    data = TensorDataset(ids, torch.randint(2, (len(ids),), generator=source))
    options = {"fused": True} if way == "fused" else {}
    optimizer = library_of(way).AdamW(model.parameters(), lr=1e-2, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=BATCH)
    )
    for batch, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.tick()


if __name__ == "__main__":
    torch.manual_seed(0)
    compare(
        f"accelerate, {ITEMS:,} items",
        nn.Sequential(nn.EmbeddingBag(ITEMS, COLUMNS), nn.Linear(COLUMNS, 2)),
        train,
    )
