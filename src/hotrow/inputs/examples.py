"""The example tables and ids that the lesson and `hotrow compare` use.

The tables, ids and seed of examples A and B come from Sebastian Raschka, "Build a Large Language
Model (From Scratch)", chapter 2, and from its notebook on embedding layers and linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """Ids to look up, and a function that creates the table."""

    title: str
    table: Callable[[], Tensor]
    ids: tuple[int, ...]


def seeded_table(rows: int, columns: int, seed: int = 123) -> Tensor:
    """Return the initial weight of `torch.nn.Embedding(rows, columns)` for the given torch seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Embedding(rows, columns).weight.detach()


def _zipf(rows: int, count: int, seed: int = 123) -> tuple[int, ...]:
    """Draw ids distributed like words in text, with frequencies proportional to 1 / (id + 1)."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1.0 / torch.arange(1, rows + 1, device="cpu")
    return tuple(torch.multinomial(frequencies, count, True, generator=generator).tolist())


A = Example("Example A: ids 2, 3, 1 in a 4 x 5 table", lambda: seeded_table(4, 5), (2, 3, 1))
B = Example("Example B: ids 2, 3, 5, 1 in a 6 x 3 table", lambda: seeded_table(6, 3), (2, 3, 5, 1))
GPT2 = Example(
    "A table the size of GPT-2's, and 300 ids distributed like words",
    lambda: seeded_table(50_257, 768),
    _zipf(50_257, 300),
)

ALL = (A, GPT2)
