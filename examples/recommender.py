"""A small recommender, trained by torch.optim and by hotrow side by side.

Who will like what: made-up people with hidden tastes see things of hidden kinds, some people and
some things far more often than others (Zipf). Three tables of very different size and a small MLP
learn it from ids alone. A batch touches a few thousand rows, but dense Adam moves every row that
was ever touched, by its momentum. hotrow ends with the same numbers.

    python examples/recommender.py
"""

from __future__ import annotations

import os

# torch reads it once. Large tensors on huge pages make its dense step faster: its best form.
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import argparse
import copy
import math
import sys

import torch
import torch.nn.functional as F
from side_by_side import SideBySide
from torch import Tensor, nn

import hotrow

TASTES, HISTORY = 8, 8


class Recommender(nn.Module):
    """The user, the item, its category and the mean of the user's history, through an MLP."""

    def __init__(self, users: int, items: int, categories: int, width: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.category = nn.Embedding(categories, width)
        self.mlp = nn.Sequential(nn.Linear(5 * width, width), nn.GELU(), nn.Linear(width, 1))
        for table in (self.user, self.item, self.category):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor, category: Tensor, history: Tensor) -> Tensor:
        """(B,) three times and (B, H) -> (B,) logits."""
        u, i, c = self.user(user), self.item(item), self.category(category)  # (B, D) each
        h = self.item(history).mean(-2)  # (B, H, D) -> (B, D)
        return self.mlp(torch.cat([u, i, c, h, (u + h) * (i + c)], -1)).squeeze(-1)


class World:
    """People with tastes, and things of kinds; what somebody likes is never told, only shown."""

    def __init__(self, users: int, items: int, categories: int, seed: int) -> None:
        random = self.random(seed)
        self.users, self.items = zipf(users), zipf(items)
        self.category = torch.randint(categories, (items,), generator=random)
        kinds = torch.randn(categories, TASTES, generator=random)
        own = torch.randn(items, TASTES, generator=random)
        self.kinds = kinds[self.category] + 0.5 * own  # (items, TASTES)
        self.tastes = torch.randn(users, TASTES, generator=random)
        self.appeal = torch.randn(items, generator=random) - 1.0

    def batch(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """(user, item, category, history), whether the user liked the item (0.0 or 1.0)."""
        random = self.random(seed)
        user = draw(self.users, (size,), random)
        item = draw(self.items, (size,), random)
        odds = torch.sigmoid(self.affinity(user, item) + self.appeal[item])
        liked = (torch.rand(size, generator=random) < odds).float()
        seen = draw(self.items, (size, 4 * HISTORY), random)
        best = self.affinity(user[:, None], seen).topk(HISTORY).indices  # they liked these
        return (user, item, self.category[item], seen.gather(1, best)), liked

    def affinity(self, user: Tensor, item: Tensor) -> Tensor:
        """How well taste and kind agree."""
        return (self.tastes[user] * self.kinds[item]).sum(-1)

    @staticmethod
    def random(seed: int) -> torch.Generator:
        """The same numbers for the same seed."""
        return torch.Generator().manual_seed(seed)


def zipf(count: int) -> Tensor:
    """Sums of the odds 1 / rank."""
    return (1 / torch.arange(1, count + 1).double()).cumsum(0)


def draw(sums: Tensor, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Ids with these odds."""
    return torch.searchsorted(sums, torch.rand(shape, generator=random).double() * sums[-1])


def auc(logits: Tensor, liked: Tensor) -> float:
    """How often a liked one is ranked before one that is not, by the ranks of the liked ones."""
    ranks = torch.empty(len(logits)).double()
    ranks[logits.argsort()] = torch.arange(1, len(logits) + 1).double()
    good = liked.sum().double()
    return ((ranks[liked == 1].sum() - good * (good + 1) / 2) / good / (len(liked) - good)).item()


def base_rate(liked: Tensor) -> float:
    """The log loss of who knows only how many are liked."""
    rate = liked.mean().item()
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


def trainer(model, optimizer):
    """A training step as anywhere."""

    def step(batch):
        fields, liked = batch
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(*fields), liked)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main(arguments: list[str] | None = None) -> int:
    """Run both, and return the exit code."""
    asked = options(arguments)
    sizes = asked.rows, max(1, asked.rows // 4), max(1, asked.rows // 200)
    world = World(*sizes, asked.seed)
    torch.manual_seed(asked.seed)
    dense = Recommender(*sizes, asked.width)
    model = copy.deepcopy(dense)

    # With torch, in its fastest form:
    dense_optimizer = torch.optim.Adam(dense.parameters(), lr=asked.lr, fused=True)

    # With hotrow, two lines change:
    model = hotrow.convert(model)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=asked.lr, fused=True)

    print(f"{sizes[0]:,} users, {sizes[1]:,} items, {sizes[2]:,} categories, width {asked.width}")
    sides = SideBySide([trainer(dense, dense_optimizer), trainer(model, optimizer)])
    first = 1 + asked.seed * (asked.steps + 1)
    sides.train(lambda t: world.batch(asked.batch, first + t), asked.steps)

    fields, liked = world.batch(20_000, first + asked.steps)
    with torch.no_grad():
        logits = [each(*fields) for each in (dense, model)]
    losses = [F.binary_cross_entropy_with_logits(each, liked).item() for each in logits]
    sides.compare("held-out log loss", losses)
    print(f"{'  base rate alone':24}{base_rate(liked):14.4f}")
    sides.compare("held-out AUC", [auc(each, liked) for each in logits])
    print()
    sides.times()
    sides.memory([dense, model])
    return sides.verdict()


def options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200_000, help="users; a quarter are items")
    parser.add_argument("--width", type=int, default=64, help="numbers in a row")
    parser.add_argument("--batch", type=int, default=1024, help="pairs of user and item in a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
