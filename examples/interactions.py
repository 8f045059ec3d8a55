"""Synthetic data about which users like which items, with a structure that a model can learn.

Each user has a taste, and each item has a kind and an appeal. Tastes and kinds are vectors of
TASTES normally distributed numbers. Items in the same category have similar kinds. The dot product
of taste and kind, plus the item's appeal, is the logit of the probability that the user likes the
item. Users and items occur with probabilities proportional to 1 / rank (Zipf's law).
"""

from __future__ import annotations

import torch
from torch import Tensor

TASTES, HISTORY = 8, 8
Batch = tuple[tuple[Tensor, ...], Tensor]


class World:
    """Users and items with hidden properties; a model sees only their interactions."""

    def __init__(self, users: int, items: int, categories: int, seed: int) -> None:
        random = self.random(seed)
        self.users, self.items = zipf(users), zipf(items)
        self.category = torch.randint(categories, (items,), generator=random)
        kinds = torch.randn(categories, TASTES, generator=random)
        noise = torch.randn(items, TASTES, generator=random)
        self.kinds = kinds[self.category] + 0.5 * noise  # (items, TASTES)
        self.tastes = torch.randn(users, TASTES, generator=random)
        self.appeal = torch.randn(items, generator=random) - 1.0

    def batch(self, size: int, seed: int) -> Batch:
        """Return the inputs (user, item, category, history) and the likes (0.0 or 1.0)."""
        random = self.random(seed)
        user = sample(self.users, (size,), random)
        item = sample(self.items, (size,), random)
        odds = torch.sigmoid(self.affinity(user, item) + self.appeal[item])
        liked = (torch.rand(size, generator=random) < odds).float()
        seen = sample(self.items, (size, 4 * HISTORY), random)
        # Of the 4 * HISTORY items that the user saw, the history contains those with the highest
        # affinity.
        best = self.affinity(user[:, None], seen).topk(HISTORY).indices
        return (user, item, self.category[item], seen.gather(1, best)), liked

    def affinity(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the dot product of the user's taste and the item's kind."""
        return (self.tastes[user] * self.kinds[item]).sum(-1)

    @staticmethod
    def random(seed: int) -> torch.Generator:
        """Return a seeded generator."""
        return torch.Generator().manual_seed(seed)


def zipf(count: int) -> Tensor:
    """Return the cumulative sums of 1 / rank."""
    return (1 / torch.arange(1, count + 1).double()).cumsum(0)


def sample(cumulative: Tensor, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draw random ids from the distribution with these cumulative weights."""
    return torch.searchsorted(
        cumulative, torch.rand(shape, generator=random).double() * cumulative[-1]
    )
