"""Models that are measured before and after `convert`, and their batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.bench.batches import Batches

Batch = tuple[Tensor, ...]
ModelAndBatches = tuple[nn.Module, Callable[[int], Batch]]  # a model, and t -> batch t


class Tabular(nn.Module):
    """An MLP over one-hot fields that are concatenated with dense columns."""

    def __init__(self, sizes: list[int], dense: int, width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.net = nn.Sequential(
            nn.Linear(sum(sizes) + dense, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(B, fields) and (B, dense) -> (B, 1)."""
        fields = [F.one_hot(ids[:, i], size).to(dense.dtype) for i, size in enumerate(self.sizes)]
        output: Tensor = self.net(torch.cat([*fields, dense], -1))
        return output


class Policy(nn.Module):
    """An actor-critic network over discrete states."""

    def __init__(self, states: int, width: int = 64, actions: int = 6) -> None:
        super().__init__()
        self.states = states
        self.body = nn.Sequential(
            nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.action, self.value = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """(B,) -> (B, actions + 1)."""
        dtype = self.value.weight.dtype
        hidden = self.body(F.one_hot(states.long(), self.states).to(dtype).flatten(1))
        return torch.cat([self.action(hidden), self.value(hidden)], -1)


class Plain(nn.Module):
    """A residual MLP in which `convert` finds nothing to convert."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        for layer in self.layers:
            x = self.norm(x + layer(x).relu())
        return x


class Recommender(nn.Module):
    """An MLP over one embedding row per field, concatenated with dense columns."""

    def __init__(self, sizes: list[int], dense: int, columns: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, columns) for size in sizes)
        self.net = nn.Sequential(
            nn.Linear(len(sizes) * columns + dense, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(B, fields) and (B, dense) -> (B, 1)."""
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        output: Tensor = self.net(torch.cat([*rows, dense], -1))
        return output


class Lookups(nn.Module):
    """Look up one id per field, in either one table per field or a single table for all fields."""

    def __init__(self, sizes: list[int], columns: int, is_joined: bool) -> None:
        super().__init__()
        self.is_joined = is_joined
        tables = [sum(sizes)] if is_joined else sizes
        self.tables = nn.ModuleList(nn.Embedding(size, columns) for size in tables)
        self.register_buffer("starts", torch.tensor([0, *sizes[:-1]]).cumsum(0))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, fields) -> (B, fields * columns)."""
        if self.is_joined:
            output: Tensor = self.tables[0](ids + self.starts)
            return output.flatten(1)
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], -1)


class LanguageModel(nn.Module):
    """A token embedding, a recurrent layer, and an untied output head."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, columns)
        self.body = nn.GRU(columns, columns, batch_first=True)
        self.head = nn.Linear(columns, rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits for the next token at each position, (B, T) -> (B, T, V)."""
        output: Tensor = self.head(self.body(self.table(ids))[0])
        return output


def geometric(fields: int, total: int) -> list[int]:
    """Return field sizes that grow geometrically and sum to `total`."""
    shares = [1.4**i for i in range(fields)]
    sizes = [max(2, int(total * share / sum(shares))) for share in shares]
    sizes[-1] += total - sum(sizes)
    return sizes


def _fields(sizes: list[int], dense: int, batch: int) -> Callable[[int], Batch]:
    """Return a function that draws a batch: mostly small ids for each field, and dense columns."""

    def draw(seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        drawn = torch.rand(batch, len(sizes), generator=random).pow(3)
        ids = (drawn * torch.tensor(sizes)).long()
        return ids, torch.randn(batch, dense, generator=random)

    return draw


def tabular(small: bool) -> ModelAndBatches:
    """Return a model with 26 one-hot fields, 100,000 columns in total, and 13 dense columns."""
    fields, total, dense, batch, width = (
        (4, 200, 3, 64, 16) if small else (26, 100_000, 13, 4096, 256)
    )
    sizes = geometric(fields, total)
    return Tabular(sizes, dense, width), _fields(sizes, dense, batch)


def recommender(small: bool) -> ModelAndBatches:
    """Return a model with 26 tables, 2,000,000 rows in total."""
    fields, total, dense, columns, batch, width = (
        (4, 2000, 3, 4, 64, 16) if small else (26, 2_000_000, 13, 32, 2048, 256)
    )
    sizes = geometric(fields, total)
    return Recommender(sizes, dense, columns, width), _fields(sizes, dense, batch)


def lookups(small: bool, is_joined: bool, batch: int) -> ModelAndBatches:
    """Return the recommender's tables without its network, or one table with all their rows."""
    fields, total, columns, batch = (4, 2000, 4, 64) if small else (26, 2_000_000, 32, batch)
    sizes = geometric(fields, total)
    draw = _fields(sizes, 0, batch)
    return Lookups(sizes, columns, is_joined), lambda seed: draw(seed)[:1]


def language_model(small: bool) -> ModelAndBatches:
    """Return a language model with a vocabulary as large as GPT-2's."""
    rows, columns, batch, length = (300, 8, 2, 8) if small else (50_257, 128, 8, 32)
    ids = Batches(rows, batch * length)
    return LanguageModel(rows, columns), lambda t: (ids[t].view(batch, length),)


def policy(small: bool, states: int = 500, batch: int = 64) -> ModelAndBatches:
    """Return a policy network, by default for the 500 states of Gymnasium's Taxi environment."""

    def draw(seed: int) -> Batch:
        return (torch.randint(states, (batch,), generator=torch.Generator().manual_seed(seed)),)

    return Policy(states), draw


def plain(small: bool) -> ModelAndBatches:
    """Return a network in which `convert` finds nothing to convert."""
    width, batch = (16, 8) if small else (512, 256)

    def draw(seed: int) -> Batch:
        return (torch.randn(batch, width, generator=torch.Generator().manual_seed(seed)),)

    return Plain(width), draw
