"""Train a small recommender with torch.optim and hotrow side by side.

The data are synthetic. Users with hidden tastes rate items of hidden kinds. A few users and items
occur far more often than the others (Zipf's law). Three tables of very different sizes and a small
MLP learn from the ids alone. A batch touches a few thousand rows, but dense Adam's momentum moves
every row that was ever touched. hotrow reaches the same losses.

    python examples/recommender.py
"""

from __future__ import annotations

import os

# Set this before importing torch: huge pages make torch's dense step faster on Linux.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import copy
import functools
import math
import sys

import torch
import torch.nn.functional as F
from interactions import HISTORY, Batch, World
from side_by_side import SideBySide, options, trainer
from torch import Tensor, nn

import hotrow


class Recommender(nn.Module):
    """An MLP that predicts likes from the user, the item, its category and the user's history."""

    def __init__(self, users: int, items: int, categories: int, width: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.category = nn.Embedding(categories, width)
        self.mlp = nn.Sequential(nn.Linear(5 * width, width), nn.GELU(), nn.Linear(width, 1))
        for table in (self.user, self.item, self.category):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor, category: Tensor, history: Tensor) -> Tensor:
        """Three (B,) id tensors and a (B, H) history -> (B,) logits."""
        u, i, c = self.user(user), self.item(item), self.category(category)  # (B, D) each
        h = self.item(history).mean(-2)  # (B, H, D) -> (B, D)
        return self.mlp(torch.cat([u, i, c, h, (u + h) * (i + c)], -1)).squeeze(-1)


def auc(logits: Tensor, liked: Tensor) -> float:
    """Return the area under the ROC curve, computed from the ranks of the liked items."""
    ranks = torch.empty(len(logits)).double()
    ranks[logits.argsort()] = torch.arange(1, len(logits) + 1).double()
    good = liked.sum().double()
    return ((ranks[liked == 1].sum() - good * (good + 1) / 2) / good / (len(liked) - good)).item()


def base_rate(liked: Tensor) -> float:
    """Return the log loss of always predicting the overall rate of likes."""
    rate = liked.mean().item()
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy in nats."""
    fields, liked = batch
    return F.binary_cross_entropy_with_logits(model(*fields), liked)


def main(arguments: list[str] | None = None) -> int:
    """Train with torch and with hotrow, and return the exit code."""
    args = options(
        arguments,
        __doc__,
        steps=(1000, "training steps"),
        rows=(200_000, "users; there are 1/4 as many items and 1/200 as many categories"),
        width=(64, "number of columns in each table"),
        batch=(1024, "(user, item) pairs per step"),
        lr=(1e-3, "learning rate"),
        seed=(0, "random seed for data, weights and batches"),
    )
    sizes = args.rows, max(1, args.rows // 4), max(1, args.rows // 200)
    world = World(*sizes, args.seed)
    torch.manual_seed(args.seed)
    dense = Recommender(*sizes, args.width)
    model = copy.deepcopy(dense)

    # With torch, use its fastest (fused) optimizer:
    dense_optimizer = torch.optim.Adam(dense.parameters(), lr=args.lr, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    print(hotrow.convert.report(model))
    print(f"{args.batch * (3 + HISTORY):,} ids per step")
    pairs = (dense, dense_optimizer), (model, optimizer)
    sides = SideBySide([trainer(o, functools.partial(loss, m)) for m, o in pairs])
    first = 1 + args.seed * (args.steps + 1)
    sides.train(lambda t: world.batch(args.batch, first + t), args.steps)

    fields, liked = world.batch(20_000, first + args.steps)
    with torch.no_grad():
        logits = [each(*fields) for each in (dense, model)]
    losses = [F.binary_cross_entropy_with_logits(each, liked).item() for each in logits]
    sides.compare("held-out log loss", losses)
    print(f"{'  base rate (baseline)':24}{base_rate(liked):14.4f}")
    sides.compare("held-out AUC", [auc(each, liked) for each in logits])
    print()
    sides.print_times()
    sides.print_memory([dense, model])
    return sides.print_verdict()


if __name__ == "__main__":
    sys.exit(main())
