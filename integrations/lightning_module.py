"""A LightningModule with a learning rate schedule and gradient clipping."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from integrations.common import Clock, compare, library_of

ITEMS, COLUMNS, LENGTH, BATCH, STEPS = 200_000, 32, 16, 256, 12


class Classifier(lightning.LightningModule):
    """Classifies sequences of items by the mean of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, COLUMNS, mode="mean")
        self.head = nn.Linear(COLUMNS, 2)
        self.way = "dense"

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss."""
        ids, labels = batch
        return nn.functional.cross_entropy(self.head(self.items(ids)), labels)

    def configure_optimizers(self) -> Any:
        """Create the optimizer and its learning rate schedule."""
        # Lightning doesn't clip the gradients of a fused optimizer.
        optimizer = library_of(self.way).AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Tick(lightning.Callback):
    """Call `clock.tick` after each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step."""
        self.clock.tick()


def train(model: nn.Module, way: str, clock: Clock) -> None:
    """Train on random sequences."""
    source = torch.Generator().manual_seed(2)
    ids = (torch.rand(STEPS * BATCH, LENGTH, generator=source).pow(3) * ITEMS).long()
    labels = torch.randint(2, (len(ids),), generator=source)
    assert isinstance(model, Classifier)
    model.way = way
    lightning.Trainer(
        max_epochs=1,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        callbacks=[Tick(clock)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, DataLoader(TensorDataset(ids, labels), batch_size=BATCH))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    compare(f"Lightning, {ITEMS:,} items", Classifier(), train, ("dense", "hotrow"))
